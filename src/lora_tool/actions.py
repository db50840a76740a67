"""What becomes of a tensor, in one word: plans say it, and rules ask for it without loading what plans are made of."""

from __future__ import annotations

import enum


@enum.unique
class TensorAction(str, enum.Enum):
    """What became of a tensor of the inputs or the output."""

    COPIED = "copied"
    CAST = "cast"
    MERGED = "merged"
    REPLACED = "replaced"
    ADDED = "added"
    DROPPED = "dropped"
    CONSUMED = "consumed"

    def __str__(self) -> str:
        return str(self.value)


NEW = frozenset({TensorAction.MERGED, TensorAction.REPLACED, TensorAction.ADDED})
"""What of an output the base did not have so: a writer looks at each value of it."""
