"""The ways in which a base's quantised weights can be stored."""

from __future__ import annotations

import enum

from lora_tool.core.choices import Choice


@enum.unique
class Storage(Choice):
    """How the weights of a quantised base are stored in the merged model."""

    ALL_16BIT = "all-16bit"
    """Every weight dequantised, in the dtype of the model; no weight stays quantised."""
    TOUCHED_16BIT = "touched-16bit"
    """Dequantised: the weights that the adapters change and those that servers fuse with them; the rest as in the base."""
    AS_BASE = "as-base"
    """Quantised weights stay quantised: the merge rounds those that the adapters change to their format again."""
