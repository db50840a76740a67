"""What happens to a tensor, and what verification found it to be, in one word. Rules read both without loading plans."""

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
"""Actions that write values the base does not have; the writer checks each of them for NaN and overflow."""


@enum.unique
class Verdict(str, enum.Enum):
    """What a tensor of a merged model was found to be."""

    RIGHT = "right"
    """As planned: the bytes of its source, or within the stated bound of the recomputed values."""
    DIFFERENT = "different"
    """Not as planned, and none of the causes below explains it."""
    UNCHANGED = "unchanged"
    """Still the base's values, although the adapter changes the tensor."""
    SCALED = "scaled"
    """W + factor · ΔW, with a factor that is not 1."""
    TRANSPOSED = "transposed"
    """W + ΔWᵀ."""
    MISREAD = "misread"
    """What the base's quantised weight gives where it is read wrongly; `reason` says how."""
    UNRELATED = "unrelated"
    """Changed in another direction than ΔW."""
    UNKNOWN = "unknown"
    """Not recomputed; `reason` says why."""

    def __str__(self) -> str:
        return str(self.value)
