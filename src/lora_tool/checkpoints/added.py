"""Kinds of checkpoint that other packages add: an entry point of the group `lora_tool.kinds` names an `AddedKind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from lora_tool.checkpoints.kinds import Kind, ShardedDir
from lora_tool.core.doors import KINDS, entry_points, load

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.state import TrainingState


class StateReader(Protocol):
    """Reads the training state of one kind of checkpoint."""

    def __call__(self, checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
        """Return the state; see `training_state`."""


class AddedKind(Struct, frozen=True, kw_only=True):
    """A kind of checkpoint that another package adds.

    It is asked about folders that no built-in kind knows for certain, before those whose files several programs write.
    Names of files that transformers, PEFT and the HF Trainer write are never its own.
    """

    kind: Kind
    state: StateReader | None = None
    """Reads the state of a kind whose weights lie in pieces."""
    adopted: Callable[[TrainingState], TrainingState | None] | None = None
    """Returns the state that a folder of torch's distributed checkpoints holds, read as this kind's by the names in it;
    None where they are not this kind's."""


def added_kinds() -> tuple[AddedKind, ...]:
    """Return the kinds that installed packages add, by name. Raises `BrokenPlugin`: nobody else would know its folders."""
    return tuple(load(point, AddedKind) for point in entry_points(KINDS).values())
