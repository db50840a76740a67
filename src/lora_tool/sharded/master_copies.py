"""The weights that were saved together with float32 masters, which must be these, rounded.

Stages 1 and 2 save both in one checkpoint; under stage 3 the HF Trainer writes gathered weights beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tool import keys
from lora_tool.checkpoint import AdapterDir, ModelDir, open_checkpoint
from lora_tool.errors import CheckpointError, UnsupportedCheckpoint
from lora_tool.formats.zero import ZeroTag
from lora_tool.report import Severity
from lora_tool.tensors import DType, StoredTensor

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCopies:
    """Masters and their copies, by the masters' names."""

    masters: Tensors
    copies: Tensors
    """Of some of them, of the same shape, each in one piece."""
    severity: Severity
    """What it is if they disagree: a file of which nobody knows when it was written proves less."""


def saved_copies(root: Path, tag: ZeroTag, trained: Tensors) -> SavedCopies:
    """Return the float32 masters among `trained` tensors and the copies of them that lie in the checkpoint or beside it."""
    masters = {name: tensor for name, tensor in trained.items() if tensor.dtype is DType.F32}
    copies: Tensors = {}
    severity = Severity.ERROR
    if tag.stage in (1, 2) and tag.first is not None:
        file, held = tag.first.file, tag.first.module
        copies = {
            name: file.stored(held[name], name)
            for name, master in masters.items()
            if name in held and held[name].shape == master.shape
        }
    elif tag.stage == 3:  # noqa: PLR2004 - the stage
        copies, same_step = _gathered_beside(root, tag, masters)
        severity = Severity.ERROR if same_step else Severity.WARNING
    return SavedCopies(masters=masters, copies=copies, severity=severity)


def _gathered_beside(root: Path, tag: ZeroTag, masters: Tensors) -> tuple[dict[str, StoredTensor], bool]:
    """Return the masters' names → their copies in the adapter or model in `root`; whether it is of the same step."""
    try:
        beside = open_checkpoint(root)
    except (CheckpointError, UnsupportedCheckpoint):
        return {}, False
    if not isinstance(beside, AdapterDir | ModelDir) or any(problem.fatal for problem in beside.weights.problems):
        return {}, False
    held = {keys.parse(name).canonical: tensor for name, tensor in beside.tensors.items()}
    found = {name: held.get(keys.parse(name).canonical) for name in masters}
    trainer, first = beside.folder.trainer, tag.first
    same_step = trainer is not None and first is not None and trainer.global_step == first.global_steps
    return {name: copy for name, copy in found.items() if copy and copy.shape == masters[name].shape}, same_step
