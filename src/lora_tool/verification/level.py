"""How much of a folder a verification reads."""

from __future__ import annotations

import enum

from lora_tool.core.choices import Choice


@enum.unique
class Level(Choice):
    """How much is read."""

    SAMPLE = "sample"
    """Rows of what was changed and pieces of what was copied, from everywhere: a small part of the merge's time."""
    FULL = "full"
    """Every value of every tensor."""
