"""LT306 to LT308 and LT312: a classifier's folder beside its weights."""

from __future__ import annotations

from pathlib import Path

from lora_tool.checkpoints import open_model
from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, raw, tensors
from tests.mutations.registry import MODEL, REWARD, breaks


@breaks("LT306", MODEL)
def _model_without_pad(folder: Path) -> None:
    edit.as_classifier(folder, pad=None)


@breaks("LT306 tokenizer", REWARD, quiet=True)
def _tokenizer_without_pad(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        del config["pad_token"]


@breaks("LT307", MODEL)
def _classifier_without_head(folder: Path) -> None:
    edit.as_classifier(folder)
    with tensors(folder, "model.safetensors") as table:
        del table["score.weight"]


@breaks("LT307 causal with a head", MODEL)
def _causal_with_head(folder: Path) -> None:
    edit.as_classifier(folder)
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForCausalLM"]


@breaks("LT308", MODEL)
def _default_labels(folder: Path) -> None:
    edit.as_classifier(folder, labels=None)


@breaks("LT308 three", MODEL)
def _three_labels(folder: Path) -> None:
    edit.as_classifier(folder, labels=3)


@breaks("LT308 bias", MODEL)
def _bias_of_another_head(folder: Path) -> None:
    edit.as_classifier(folder, labels=3, rows=3)
    with tensors(folder, "model.safetensors") as table:
        table["score.bias"] = raw(2, dtype="BF16")
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForTokenClassification"]


@breaks("LT308 answers", MODEL)
def _one_row_for_answers(folder: Path) -> None:
    edit.as_classifier(folder)
    with tensors(folder, "model.safetensors") as table:
        table["qa_outputs.weight"] = table.pop("score.weight")
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForQuestionAnswering"]


@breaks("LT312", MODEL, task="reward")
def _causal_asked_as_reward(folder: Path) -> None:
    assert open_model(folder).config is not None  # as it is: a causal LM


@breaks("LT312 labels, no class", MODEL, num_labels=3)
def _no_class_asked_as_classifier(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        del config["architectures"]
