"""The forms that adapters are converted to."""

from __future__ import annotations

import enum

from lora_tool.choices import Choice


@enum.unique
class AdapterForm(Choice):
    """The form that an adapter is converted to."""

    PEFT = "peft"
    """The names that PEFT loads."""
    MLX = "mlx"
    """What MLX-LM reads: its names, and transposed factors."""
