"""What verification found a tensor to be, in one word. Rules read it without loading the evidence."""

from __future__ import annotations

import enum

from lora_tool.core.choices import TextEnum


@enum.unique
class Verdict(TextEnum):
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
