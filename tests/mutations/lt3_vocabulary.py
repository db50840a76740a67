"""LT309 and LT310: ids and sizes that the weights do not have."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields
from tests.mutations.registry import CAUSAL, MODEL, REWARD, SHARDED, breaks


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
