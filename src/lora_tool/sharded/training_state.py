"""The training state of a checkpoint, whatever kind of rank files it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from lora_tool.checkpoint import DCP, ZERO, ShardedDir
from lora_tool.checkpoint.cut_safetensors import CUT_SAFETENSORS
from lora_tool.checkpoint.fsdp_ranks import FSDP_FULL, FSDP_RANKS
from lora_tool.checkpoint.megatron import MEGATRON
from lora_tool.checkpoint.state_file import STATE_FILE
from lora_tool.checkpoint.unmerged import UNMERGED_MODEL
from lora_tool.checkpoint.verl import VERL

if TYPE_CHECKING:
    from lora_tool.sharded.state import TrainingState


class StateReader(Protocol):
    """Reads the training state of one kind of checkpoint."""

    def __call__(self, checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
        """Return the state; see `training_state`."""


def training_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that the tag `tag` of a checkpoint holds; by default the one that the checkpoint points at.

    If it points at none, `or_newest` takes the newest tag. Raises `NotACheckpoint` where there is no such tag, or
    several and no choice, `UnsupportedCheckpoint` for layouts that lora-tool refuses.
    """
    read = READERS[checkpoint.kind.name]()
    return read(checkpoint, tag=tag, or_newest=or_newest)


# a reader is imported when it is needed: each knows one format, and takes a while to import


def _zero() -> StateReader:
    from lora_tool.sharded.zero_state import zero_state

    return zero_state


def _torch_dist() -> StateReader:
    from lora_tool.sharded.megatron_state import torch_dist_state

    return torch_dist_state


def _iteration() -> StateReader:
    from lora_tool.sharded.megatron_state import iteration_state

    return iteration_state


def _verl() -> StateReader:
    from lora_tool.sharded.rank_state import verl_state

    return verl_state


def _fsdp_ranks() -> StateReader:
    from lora_tool.sharded.rank_state import fsdp_ranks_state

    return fsdp_ranks_state


def _fsdp_full() -> StateReader:
    from lora_tool.sharded.rank_state import fsdp_full_state

    return fsdp_full_state


def _state_file() -> StateReader:
    from lora_tool.sharded.rank_state import state_file_state

    return state_file_state


def _cut() -> StateReader:
    from lora_tool.sharded.cut_state import cut_state

    return cut_state


def _whole() -> StateReader:
    from lora_tool.sharded.whole_state import whole_state

    return whole_state


READERS: dict[str, Callable[[], StateReader]] = {
    ZERO.name: _zero,
    DCP.name: _torch_dist,
    MEGATRON.name: _iteration,
    VERL.name: _verl,
    FSDP_RANKS.name: _fsdp_ranks,
    FSDP_FULL.name: _fsdp_full,
    STATE_FILE.name: _state_file,
    CUT_SAFETENSORS.name: _cut,
    UNMERGED_MODEL.name: _whole,
}
"""The name of each kind whose weights lie in pieces → what imports its reader."""
