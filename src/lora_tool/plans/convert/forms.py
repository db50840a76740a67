"""The forms that adapters and models are converted to."""

from __future__ import annotations

import enum

from lora_tool.core.choices import Choice


@enum.unique
class AdapterForm(Choice):
    """The form that an adapter, or for SEQ_CLS a model too, is converted to."""

    PEFT = "peft"
    """The names that PEFT loads."""
    MLX = "mlx"
    """What MLX-LM reads: its names, and transposed factors."""
    PEFT_EXPERTS = "peft-experts"
    """One pair of factors for each expert's matrix, as transformers 4 and checkpoints have them."""
    PEFT_FUSED = "peft-fused"
    """One pair for the matrices of all experts, as PEFT has them on transformers 5."""
    SEQ_CLS = "seq-cls"
    """A sequence classifier, whose scores are the logits of a judge's tokens, or labels of another classifier."""
