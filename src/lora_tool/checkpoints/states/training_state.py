"""The training state of a checkpoint, whatever kind of rank files it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lora_tool.checkpoints import DCP, ZERO, ShardedDir
from lora_tool.checkpoints.cut_safetensors import CUT_SAFETENSORS
from lora_tool.checkpoints.fsdp import FSDP_FULL, FSDP_RANKS
from lora_tool.checkpoints.megatron import MEGATRON
from lora_tool.checkpoints.state_file import STATE_FILE
from lora_tool.checkpoints.unmerged import UNMERGED_MODEL
from lora_tool.checkpoints.verl import VERL

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.state import TrainingState


class StateReader(Protocol):
    """Reads the training state of one kind of checkpoint."""

    def __call__(self, checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
        """Return the state; see `training_state`."""


READERS: dict[str, StateReader] = {}
"""Kinds of checkpoint that other packages add → what reads their state."""


def training_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that the tag `tag` of a checkpoint holds; by default the one that the checkpoint points at.

    If it points at none, `or_newest` takes the newest tag. Raises `NotACheckpoint` where there is no such tag, or
    several and no choice, `UnsupportedCheckpoint` for layouts that lora-tool refuses.
    """
    kind = checkpoint.kind
    # each reader knows one format, and takes a while to import
    if kind is ZERO:
        from lora_tool.checkpoints.states.zero_state import zero_state

        state = zero_state(checkpoint, tag=tag, or_newest=or_newest)
    elif kind is DCP:
        from lora_tool.checkpoints.states.megatron_state import torch_dist_state

        state = torch_dist_state(checkpoint, tag=tag, or_newest=or_newest)
    elif kind is MEGATRON:
        from lora_tool.checkpoints.states.megatron_state import iteration_state

        state = iteration_state(checkpoint, tag=tag, or_newest=or_newest)
    elif kind is VERL:
        from lora_tool.checkpoints.states.rank_state import verl_state

        state = verl_state(checkpoint, tag=tag, or_newest=or_newest)
    elif kind in (FSDP_RANKS, FSDP_FULL, STATE_FILE):
        state = _in_one_save(checkpoint, tag)
    elif kind is CUT_SAFETENSORS:
        from lora_tool.checkpoints.states.cut_state import cut_state

        state = cut_state(checkpoint, tag=tag)
    elif kind is UNMERGED_MODEL:
        from lora_tool.checkpoints.states.cut_state import whole_state

        state = whole_state(checkpoint, tag=tag)
    else:
        state = READERS[kind.name](checkpoint, tag=tag, or_newest=or_newest)
    return state


def _in_one_save(checkpoint: ShardedDir, tag: str | None) -> TrainingState:
    """Return the state in files of `torch.save` that hold one save."""
    from lora_tool.checkpoints.states.rank_state import fsdp_full_state, fsdp_ranks_state, state_file_state

    if checkpoint.kind is FSDP_RANKS:
        return fsdp_ranks_state(checkpoint, tag=tag)
    if checkpoint.kind is FSDP_FULL:
        return fsdp_full_state(checkpoint, tag=tag)
    return state_file_state(checkpoint, tag=tag)
