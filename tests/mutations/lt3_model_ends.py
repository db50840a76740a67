"""The ends of a model folder: head and labels, rows of the vocabulary, the token that ends a turn."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, raw, tensors
from tests.mutations.registry import CAUSAL, CAUSAL_MERGED, MODEL, REWARD, SHARDED, Edit, breaks, enter


@breaks("LT308 answers", MODEL)
def _one_row_for_answers(folder: Path) -> None:
    edit.as_classifier(folder)
    with tensors(folder, "model.safetensors") as table:
        table["qa_outputs.weight"] = table.pop("score.weight")
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForQuestionAnswering"]


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


@breaks("LT310", SHARDED)
def _fewer_layers(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["num_hidden_layers"] = 4


EDITS = {
    "LT310 vocabulary of the base": Edit(CAUSAL, base={"vocab_size": 608}, with_base=True),
    "LT306": Edit(MODEL, by=lambda folder: edit.as_classifier(folder, pad=None)),
    "LT306 tokenizer": Edit(REWARD, file="tokenizer_config.json", without=["pad_token"], quiet=True),
    "LT307": Edit(MODEL, by=edit.as_classifier, removed=["score.weight"]),
    "LT307 causal with a head": Edit(
        MODEL, by=edit.as_classifier, file="config.json", config={"architectures": ["Qwen2ForCausalLM"]}
    ),
    "LT308": Edit(MODEL, by=lambda folder: edit.as_classifier(folder, labels=None)),
    "LT308 three": Edit(MODEL, by=lambda folder: edit.as_classifier(folder, labels=3)),
    "LT308 bias": Edit(
        MODEL,
        by=lambda folder: edit.as_classifier(folder, labels=3, rows=3),
        file="config.json",
        config={"architectures": ["Qwen2ForTokenClassification"]},
        tensors={"score.bias": raw(2, dtype="BF16")},
    ),
    "LT312": Edit(MODEL, options={"task": "reward"}),
    "LT312 labels, no class": Edit(MODEL, file="config.json", without=["architectures"], options={"num_labels": 3}),
    "LT309": Edit(MODEL, by=lambda folder: edit.as_classifier(folder, pad=304)),
    "LT309 causal": Edit(MODEL, file="config.json", config={"pad_token_id": 304}),
    "LT309 tokenizer": Edit(MODEL, by=_add_pad_token),
    "LT309 adapter": Edit(CAUSAL, by=_add_pad_token, with_base=True),
    "LT309 old tokenizer": Edit(
        REWARD,
        file="tokenizer_config.json",
        config={
            "pad_token": {"content": "[PAD]", "special": True},
            "added_tokens_decoder": {"304": {"content": "[PAD]", "special": True}},
        },
        with_base=True,
    ),
    "LT309 end of text": Edit(
        MODEL,
        file="tokenizer_config.json",
        config={"eos_token": "</t>", "added_tokens_decoder": {"304": {"content": "</t>", "special": True}}},
    ),
    "LT310 in the base": Edit(CAUSAL, by=lambda folder: _fewer_layers(folder.parent / "base"), with_base=True),
    "LT310 vocabulary": Edit(MODEL, file="config.json", config={"vocab_size": 320}),
    "LT320": Edit(CAUSAL_MERGED, file="generation_config.json", config={"eos_token_id": 2}),
}
enter(__name__, EDITS)
