"""Where the modules of a base model are in memory, by the classes of transformers that no table of ours has."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.mapping.meta import build, candidates
from lora_tool.models.model_tensors import ModuleNames


def built_modules(
    config: ModelConfig, tensors: Iterable[str], class_name: str | None, auto_class: str
) -> ModuleNames | None:
    """Return the modules of the class that a base with this config and these `tensors` is trained as, and of its base model's own class.

    `class_name` is that class where somebody names it, else it is the one that `auto_class` gives. Single experts,
    which transformers fuses, are among the modules by their names on disk. None where transformers cannot build the
    class.
    """
    named = [class_name] if class_name else []
    for name in (*named, *candidates(config, auto_class)):
        try:
            model = build(config, name, torch.float32)
        except UnsupportedAdapter:
            continue
        prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
        headed = frozenset(path for path, _ in model.named_modules() if path)
        experts = {path for tensor in tensors if ".experts." in (path := tensor.rpartition(".")[0])}
        headed |= {path for path in experts if path.startswith(f"{prefix}.") or not prefix}
        below = frozenset(path.removeprefix(f"{prefix}.") for path in headed if path.startswith(f"{prefix}."))
        return ModuleNames(prefix=prefix, headed=headed, bare=below if prefix else headed)
    return None
