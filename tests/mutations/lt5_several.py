"""LT512, LT530: adapters that are merged together, or averaged."""

from __future__ import annotations

from lora_tool.checkpoints import open_checkpoint
from tests.checkpoint_edits import Raw
from tests.mutations.registry import CAUSAL, FIXTURES, REWARD, Edit, enter


def _negative(tensor: Raw) -> Raw:
    """Return a bfloat16 tensor with the other sign of every value."""
    return Raw(tensor.dtype, tensor.shape, bytes(byte ^ (at % 2 << 7) for at, byte in enumerate(tensor.data)))


EDITS = {
    "LT512": Edit(CAUSAL, with_base=True, options={"adapters": [open_checkpoint(FIXTURES / CAUSAL)]}),
    "LT512 tasks": Edit(
        REWARD,
        config={
            "task_type": None,
            "auto_mapping": {
                "base_model_class": "Qwen2ForSequenceClassification",
                "parent_library": "transformers.models.qwen2.modeling_qwen2",
            },
        },
        options={"adapters": [open_checkpoint(FIXTURES / CAUSAL)]},
    ),
    "LT530": Edit(
        REWARD,
        changed={"{SCORE}": _negative},
        options={"adapters": [open_checkpoint(FIXTURES / REWARD)], "average": True},
    ),
}
enter(__name__, EDITS)
