"""What a plan does with a tensor, in one word. Rules read it without loading plans."""

from __future__ import annotations

import enum

from lora_tool.core.choices import TextEnum


@enum.unique
class TensorAction(TextEnum):
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


NEW = frozenset({TensorAction.MERGED, TensorAction.REPLACED, TensorAction.ADDED, TensorAction.COMPUTED})
"""Actions that write values the base does not have; the writer checks each of them for NaN and overflow, and
what it dequantises."""
