"""LT512: adapters that are merged together."""

from __future__ import annotations

from lora_tool.checkpoints import open_checkpoint
from tests.mutations.registry import CAUSAL, FIXTURES, REWARD, Edit, enter

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
}
enter(__name__, EDITS)
