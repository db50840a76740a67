"""The training state of a checkpoint, whatever kind of rank files it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_tool.checkpoints import DCP, ZERO, ShardedDir
from lora_tool.checkpoints.added import added_kinds
from lora_tool.checkpoints.fsdp import CUT_SAFETENSORS, FSDP_FULL, FSDP_RANKS
from lora_tool.checkpoints.models import UNMERGED_MODEL
from lora_tool.checkpoints.state_file import STATE_FILE
from lora_tool.checkpoints.verl import VERL

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.state import TrainingState


def training_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that the tag `tag` of a checkpoint holds; by default the one that the checkpoint points at.

    If it points at none, `or_newest` takes the newest tag. Raises `NotACheckpoint` where there is no such tag, or
    several and no choice, `UnsupportedCheckpoint` for layouts that lora-tool refuses.
    """
    kind = checkpoint.kind
    state: TrainingState
    # each reader knows one format, and takes a while to import
    if kind is ZERO:
        from lora_tool.checkpoints.states.zero_state import zero_state

        state = zero_state(checkpoint, tag=tag, or_newest=or_newest)
    elif kind is DCP:
        from lora_tool.checkpoints.states.dcp_state import dcp_state

        state = _adopted(dcp_state(checkpoint, tag=tag, or_newest=or_newest))
    elif kind is VERL:
        from lora_tool.checkpoints.states.rank_state import verl_state

        state = verl_state(checkpoint, tag=tag, or_newest=or_newest)
    elif kind in (FSDP_RANKS, FSDP_FULL, STATE_FILE):
        from lora_tool.checkpoints.states.rank_state import torch_state

        state = torch_state(checkpoint, tag=tag)
    elif kind is CUT_SAFETENSORS:
        from lora_tool.checkpoints.states.cut_state import cut_state

        state = cut_state(checkpoint, tag=tag)
    elif kind is UNMERGED_MODEL:
        from lora_tool.checkpoints.states.cut_state import whole_state

        state = whole_state(checkpoint, tag=tag, or_newest=or_newest)
    else:
        state = _added(checkpoint, tag=tag, or_newest=or_newest)
    return state


def _adopted(state: TrainingState) -> TrainingState:
    """Return the state of torch's distributed checkpoints, as the program read it whose names are in it."""
    readers = (added.adopted for added in added_kinds() if added.adopted is not None)
    return next((found for read in readers if (found := read(state)) is not None), state)


def _added(checkpoint: ShardedDir, *, tag: str | None, or_newest: bool) -> TrainingState:
    """Return the state of a kind that another package adds."""
    for added in added_kinds():
        if added.kind is checkpoint.kind and added.state is not None:
            return added.state(checkpoint, tag=tag, or_newest=or_newest)
    raise AssertionError(f"nothing reads the state of {checkpoint.kind.with_article}")
