"""LT301 to LT304: the head of a classification or reward model."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, lora, raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, RUN, breaks


@breaks("LT301", REWARD)
def _no_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[places.SCORE]


@breaks("LT301 trained without a task type", REWARD, with_base=True)
def _no_head_and_no_task(folder: Path) -> None:
    _no_head(folder)
    with fields(folder) as config:
        config |= {"task_type": None, "modules_to_save": None}
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers",
        }


@breaks("LT301 in a run", RUN)
def _no_head_in_run(folder: Path) -> None:
    _no_head(folder)


@breaks("LT301 by class", REWARD)
def _no_head_of_the_class(folder: Path) -> None:
    _no_head(folder)
    with fields(folder) as config:
        config["task_type"] = None
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers.models.qwen2.modeling_qwen2",
        }


@breaks("LT301 by class with a base", REWARD, with_base=True)
def _no_head_of_the_class_with_base(folder: Path) -> None:
    _no_head_of_the_class(folder)


@breaks("LT302", REWARD)
def _lora_on_head(folder: Path) -> None:
    with tensors(folder) as table:
        del table[places.SCORE]
        table.update(lora("score", rows=1, columns=16))
    with fields(folder) as config:
        config["modules_to_save"] = None
        config["target_modules"].append("score")


@breaks("LT302 without a task", REWARD)
def _lora_on_head_no_task(folder: Path) -> None:
    _lora_on_head(folder)
    with fields(folder) as config:
        config["task_type"] = None


@breaks("LT302 with a base", REWARD, with_base=True)
def _lora_on_head_with_base(folder: Path) -> None:
    _lora_on_head(folder)


@breaks("LT303", REWARD, num_labels=5)
def _other_number_of_labels(folder: Path) -> None:
    assert folder.is_dir()  # nothing is wrong with the folder but what is asked of it


@breaks("LT303 reward", REWARD, task="reward")
def _five_rows(folder: Path) -> None:
    with tensors(folder) as table:
        table[places.SCORE] = raw(5, 16, dtype="BF16")


@breaks("LT303 base", REWARD, with_base=True)
def _base_of_three_labels(folder: Path) -> None:
    edit.as_classifier(folder.parent / "base", labels=3, rows=3)


@breaks("LT304", REWARD)
def _causal_task(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = "CAUSAL_LM"


@breaks("LT304 no task", REWARD)
def _no_task(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = None


@breaks("LT304 asked for", CAUSAL, task="reward")
def _not_a_reward_model(folder: Path) -> None:
    assert folder.is_dir()


@breaks("LT304 base", CAUSAL, with_base=True)
def _base_of_another_class(folder: Path) -> None:
    with fields(folder.parent / "base", "config.json") as config:
        config["architectures"] = ["LlamaForSequenceClassification"]


@breaks("LT304 another task", REWARD, task="token-cls")
def _not_a_token_classifier(folder: Path) -> None:
    assert folder.is_dir()


@breaks("LT304 trained class", REWARD, task="causal-lm")
def _no_causal_class(folder: Path) -> None:
    with fields(folder) as config:
        config["task_type"] = None
        config["auto_mapping"] = {
            "base_model_class": "Qwen2ForSequenceClassification",
            "parent_library": "transformers.models.qwen2.modeling_qwen2",
        }
