"""The training state of a checkpoint, whatever kind of rank files it has."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from lora_tool.checkpoint import ShardedDir

if TYPE_CHECKING:
    from lora_tool.sharded.state import TrainingState


def training_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that the tag `tag` of a checkpoint holds; by default the one that the checkpoint points at.

    If it points at none, `or_newest` takes the newest tag. Raises `NotACheckpoint` where there is no such tag, or
    several and no choice, `UnsupportedCheckpoint` for layouts that lora-tool refuses.
    """
    module, _, name = checkpoint.kind.state.partition(":")
    read = getattr(importlib.import_module(module), name)
    return cast("TrainingState", read(checkpoint, tag=tag, or_newest=or_newest))
