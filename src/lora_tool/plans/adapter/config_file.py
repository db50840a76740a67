"""The `adapter_config.json` of a written adapter: the input's, changed where it must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig
from lora_tool.formats.files import json_bytes, read_json
from lora_tool.plans.core.steps import SideFile


def config_file(
    config: AdapterConfig,
    changes: Mapping[str, Any],
    why: tuple[str, ...] = (),
    *,
    rebuilt: Mapping[str, Any] | None = None,
) -> SideFile:
    """Return the config with `changes` in its fields, described by `why`, and the base as an absolute path.

    A relative path of the base would mean another folder from there. A config without any change is copied.
    `rebuilt` are the fields of a config that no file had.
    """
    changed, reasons = dict(changes), [*why]
    base = config.path.parent / (config.base_model or "")
    if config.base_model and not Path(config.base_model).is_absolute() and base.is_dir():
        changed["base_model_name_or_path"] = str(base.resolve())
        reasons.append("the whole path of the base model")
    if not changed and rebuilt is None:
        return SideFile(filename=FILE_NAME, source=config.path, reason=f"copied from {config.path.parent}")
    content = json_bytes({**(read_json(config.path) if rebuilt is None else rebuilt), **changed}, indent=2)
    what = f"that of {config.path.parent}" if rebuilt is None else "rebuilt"
    reason = f"{what}, with {' and '.join(reasons)}" if reasons else what
    return SideFile(filename=FILE_NAME, content=content, reason=reason)
