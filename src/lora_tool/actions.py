"""What becomes of a tensor, and what it is found to be, in one word: rules ask for it without loading plans or evidence."""

from __future__ import annotations

import enum


@enum.unique
class TensorAction(str, enum.Enum):
    """What became of a tensor of the inputs or the output."""

    COPIED = "copied"
    CAST = "cast"
    DEQUANTISED = "dequantised"
    MERGED = "merged"
    RESCALED = "rescaled"
    REPLACED = "replaced"
    ADDED = "added"
    COMPUTED = "computed"
    DROPPED = "dropped"
    CONSUMED = "consumed"

    def __str__(self) -> str:
        return str(self.value)


NEW = frozenset({TensorAction.MERGED, TensorAction.REPLACED, TensorAction.ADDED, TensorAction.COMPUTED})
"""What of an output the base did not have so: a writer looks at each value of it."""


@enum.unique
class Verdict(str, enum.Enum):
    """What a tensor of a merged model was found to be."""

    RIGHT = "right"
    """What the plan says: its source's bytes, or within the stated bound of the recomputation."""
    DIFFERENT = "different"
    """Not what the plan says, in none of the ways below."""
    UNCHANGED = "unchanged"
    """The base's own values, though the adapter changes it."""
    SCALED = "scaled"
    """W + factor · ΔW, with a factor that is not 1."""
    TRANSPOSED = "transposed"
    """W + ΔWᵀ."""
    UNRELATED = "unrelated"
    """Changed in another direction than ΔW."""
    UNKNOWN = "unknown"
    """Not recomputed; `reason` says why."""

    def __str__(self) -> str:
        return str(self.value)
