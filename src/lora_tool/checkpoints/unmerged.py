"""A PEFT model that was saved as if it were a model: `pytorch_model.bin` or `model.safetensors` with LoRA in it.

DeepSpeed's `zero_to_fp32.py` and `save_16bit_model` write such files of LoRA runs, and accelerate's `merge-weights`.
Only the names of the tensors tell them from a model's: the kind is not in the registry, which goes by names of files.
"""

from __future__ import annotations

import re

from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, ModelDir, ShardedDir, ShardedKind, open_here
from lora_tool.core.keys import has_lora_factor

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)\Z")


def unmerged_model(found: ModelDir) -> ShardedDir | None:
    """Return the training state that a folder holds in place of a model, None for a model."""
    return open_here(UNMERGED_MODEL, _WEIGHTS, found.folder) if any(map(has_lora_factor, found.tensors)) else None


def _by_names_of_tensors(_: Folder) -> Claim | None:
    return None


UNMERGED_MODEL: ShardedKind = ShardedKind(
    name="PEFT model's state dict",
    sign="pytorch_model.bin with LoRA",
    landmarks=(),
    weights=(),
    recognise=_by_names_of_tensors,
    open=lambda folder: open_here(UNMERGED_MODEL, _WEIGHTS, folder),
)
