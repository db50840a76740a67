"""Whether huggingface_hub's cache may hold a repository, asked without importing huggingface_hub, which takes half a second.

The layout is documented (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): a model `owner/name` lies in
the folder `models--owner--name`. Which revision is there, and where, is huggingface_hub's to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lora_tool.core.hub_names import hub_name
from lora_tool.formats.files import expanded


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache's folder, by the variables that huggingface_hub reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return _expanded(environment[name])
    home = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return _expanded(home) / "hub"


def may_hold(reference: str) -> bool:
    """Return whether the cache has a folder for the model that a reference to the Hub names."""
    named = hub_name(reference)
    return named is not None and (cache_folder() / f"models--{named.id.replace('/', '--')}").is_dir()


def _expanded(path: str) -> Path:
    return expanded(os.path.expandvars(path))
