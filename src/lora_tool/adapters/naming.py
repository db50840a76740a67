"""The beginnings of an adapter's tensor names: what PEFT, trainers and wrappers put before and into a module path."""

from __future__ import annotations

from msgspec import Struct

from lora_tool.core.keys import LINEAR_FACTORS, PREFIX, AdapterKey
from lora_tool.models.ends import is_new_module

LORA_MODEL = "model."
"""What the state dict of PEFT's `LoraModel` puts before the names of the model in it."""
PEFT_MODEL = "base_model."
"""What that of a `PeftModel` puts before them in turn."""


def bare_path(module: str) -> str:
    """Return the module path of a parsed name without what PEFT and DistributedDataParallel put before it."""
    path = module.rpartition(PREFIX)[2]
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return path


def drift(key: AdapterKey) -> str | None:
    """Return how the beginning of a tensor's name differs from the form that PEFT loads; None if it does not."""
    if not key.prefixed:
        return f"does not begin with `{PREFIX}`"
    if key.wrapper:
        return f"has `{key.wrapper}.` in it, which torch.compile, FSDP or checkpointing put there"
    if PREFIX in key.module:
        return f"has `{PREFIX}` twice"
    if key.part in LINEAR_FACTORS and key.leaf == "weight" and not key.text.endswith(".weight"):
        return "does not end with `.weight`"
    return "has `module.` in it, which DistributedDataParallel put there" if key.module.startswith("module.") else None


class PathReading(Struct, frozen=True, kw_only=True):
    """How bare paths become those in the model: `strip` is taken off their beginning, `add` put before it."""

    strip: str = ""
    add: str = ""

    def path(self, bare: str) -> str:
        """Return the path in the model; nothing is put before heads and output layers."""
        rest = bare.removeprefix(self.strip)
        return rest if is_new_module(rest) else self.add + rest


AS_THEY_ARE = PathReading()
