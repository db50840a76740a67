"""LT512: adapters that are merged together."""

from __future__ import annotations

from pathlib import Path

from lora_tool.checkpoints import open_checkpoint
from tests.checkpoint_edits import fields
from tests.mutations.registry import CAUSAL, FIXTURES, REWARD, breaks


@breaks("LT512", CAUSAL, with_base=True, adapters=[open_checkpoint(FIXTURES / CAUSAL)])
def _the_same_twice(folder: Path) -> None:
    assert folder.is_dir()


@breaks("LT512 tasks", REWARD, adapters=[open_checkpoint(FIXTURES / CAUSAL)])
def _tasks_by_class(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = None
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers.models.qwen2.modeling_qwen2",
        }
