"""The ends of a model folder: head and labels, rows of the vocabulary, the token that ends a turn."""

from __future__ import annotations

from pathlib import Path

from lora_tool.checkpoints import open_model
from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, raw, tensors
from tests.mutations.registry import CAUSAL, CAUSAL_MERGED, MODEL, REWARD, SHARDED, breaks


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


@breaks("LT309", MODEL)
def _pad_id_beyond(folder: Path) -> None:
    edit.as_classifier(folder, pad=304)


@breaks("LT309 causal", MODEL)
def _pad_id_of_a_causal_model(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["pad_token_id"] = 304


@breaks("LT309 tokenizer", MODEL)
def _pad_token_beyond(folder: Path) -> None:
    _add_pad_token(folder)


@breaks("LT309 adapter", CAUSAL, with_base=True)
def _pad_token_beyond_the_base(folder: Path) -> None:
    _add_pad_token(folder)


@breaks("LT309 old tokenizer", REWARD, with_base=True)
def _pad_token_in_the_config(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        config["pad_token"] = {"content": "[PAD]", "special": True}
        config["added_tokens_decoder"] = {"304": {"content": "[PAD]", "special": True}}


def _add_pad_token(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        config["pad_token"] = "[PAD]"
    with fields(folder, "tokenizer.json") as tokenizer:
        tokenizer["added_tokens"].append({"id": 304, "content": "[PAD]", "special": True})


@breaks("LT309 chat template", CAUSAL, with_base=True)
def _turns_without_rows(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}")
    with fields(folder, "tokenizer.json") as tokenizer:
        tokenizer["added_tokens"] += [
            {"id": 304 + at, "content": text, "special": True} for at, text in enumerate(("<|turn|>", "<|end|>"))
        ]


@breaks("LT309 end of text", MODEL)
def _eos_without_row(folder: Path) -> None:
    with fields(folder, "tokenizer_config.json") as config:
        config["eos_token"] = "</t>"
        config["added_tokens_decoder"] = {"304": {"content": "</t>", "special": True}}


@breaks("LT310", SHARDED)
def _fewer_layers(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["num_hidden_layers"] = 4


@breaks("LT310 in the base", CAUSAL, with_base=True)
def _base_with_fewer_layers(folder: Path) -> None:
    _fewer_layers(folder.parent / "base")


@breaks("LT310 vocabulary", MODEL)
def _other_vocabulary(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["vocab_size"] = 320


@breaks("LT320", CAUSAL_MERGED)
def _forget_the_end_of_a_turn(folder: Path) -> None:
    with fields(folder, "generation_config.json") as config:
        config["eos_token_id"] = 2
