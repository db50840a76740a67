"""A PEFT model that was saved as if it were a model: `pytorch_model.bin` or `model.safetensors` with LoRA in it.

DeepSpeed's `zero_to_fp32.py` and `save_16bit_model` write such files of LoRA runs, and accelerate's `merge-weights`. Only
the names of the tensors tell them from a model's.
"""

from __future__ import annotations

from lora_tool.checkpoint.folders import Folder
from lora_tool.checkpoint.kinds import Claim, ModelDir, ShardedDir, ShardedKind
from lora_tool.keys import has_lora_factor


def _recognise(_: Folder) -> Claim | None:
    return None


def _open(folder: Folder) -> ShardedDir:
    return ShardedDir(kind=UNMERGED_MODEL, folder=folder, rank_files={".": ()}, problems=folder.problems)


def unmerged_model(found: ModelDir) -> ShardedDir | None:
    """Return the training state that a folder holds in place of a model, None for a model."""
    if not any(map(has_lora_factor, found.tensors)):
        return None
    names = tuple(file.path.name for file in found.weights.files)
    return ShardedDir(kind=UNMERGED_MODEL, folder=found.folder, rank_files={".": names}, problems=found.folder.problems)


UNMERGED_MODEL = ShardedKind(
    name="PEFT model's state dict",
    sign="pytorch_model.bin with LoRA",
    landmarks=(),
    weights=(),
    state="lora_tool.sharded.whole_state:whole_state",
    recognise=_recognise,
    open=_open,
)
