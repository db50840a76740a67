"""LT301 to LT304: the head of a classification or reward model."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, lora, raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, RUN, Edit, breaks, enter


@breaks("LT301", REWARD)
def _no_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[places.SCORE]


@breaks("LT301 by class", REWARD)
def _no_head_of_the_class(folder: Path) -> None:
    _no_head(folder)
    with fields(folder) as config:
        config["task_type"] = None
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers.models.qwen2.modeling_qwen2",
        }


@breaks("LT302", REWARD)
def _lora_on_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[places.SCORE]
        table.update(lora("score", rows=1, columns=16))
    with fields(folder) as config:
        config["modules_to_save"] = None
        config["target_modules"].append("score")


EDITS = {
    "LT301 trained without a task type": Edit(
        REWARD,
        by=_no_head,
        config={
            "task_type": None,
            "modules_to_save": None,
            "auto_mapping": {"base_model_class": "Qwen2ForSequenceClassification", "parent_library": "transformers"},
        },
        with_base=True,
    ),
    "LT301 in a run": Edit(RUN, by=_no_head),
    "LT301 by class with a base": Edit(REWARD, by=_no_head_of_the_class, with_base=True),
    "LT302 without a task": Edit(REWARD, by=_lora_on_head, config={"task_type": None}),
    "LT302 with a base": Edit(REWARD, by=_lora_on_head, with_base=True),
    "LT303": Edit(REWARD, options={"num_labels": 5}),
    "LT303 reward": Edit(REWARD, tensors={"{SCORE}": raw(5, 16, dtype="BF16")}, options={"task": "reward"}),
    "LT303 base": Edit(
        REWARD, by=lambda folder: edit.as_classifier(folder.parent / "base", labels=3, rows=3), with_base=True
    ),
    "LT304": Edit(REWARD, config={"task_type": "CAUSAL_LM"}),
    "LT304 no task": Edit(REWARD, config={"task_type": None}),
    "LT304 asked for": Edit(CAUSAL, options={"task": "reward"}),
    "LT304 base": Edit(CAUSAL, base={"architectures": ["LlamaForSequenceClassification"]}, with_base=True),
    "LT304 another task": Edit(REWARD, options={"task": "token-cls"}),
    "LT304 trained class": Edit(
        REWARD,
        config={
            "task_type": None,
            "auto_mapping": {
                "base_model_class": "Qwen2ForSequenceClassification",
                "parent_library": "transformers.models.qwen2.modeling_qwen2",
            },
        },
        options={"task": "causal-lm"},
    ),
}
enter(__name__, EDITS)
