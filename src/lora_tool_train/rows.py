"""The rows as the Trainer's collator makes them: which tokens have labels, whether the end is one, one row in full."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from msgspec import Struct

from lora_tool.core.report import Finding, Severity
from lora_tool_train.traps import trap

READ = 32
"""Rows that are collated, spread over the data."""
MASKED = -100
"""The label of a token that the loss leaves out, as torch's cross entropy has it."""
_SHOWN = 600
"""Characters of a text that are shown from its beginning and from its end."""


class Row(Struct, frozen=True, kw_only=True):
    """One row of the data, alone in a batch."""

    tokens: Sequence[int]
    labels: Sequence[int]
    own: Sequence[int]
    """Its tokens before the collator, without padding."""

    @property
    def has_labels(self) -> bool:
        return any(label != MASKED for label in self.labels)

    @property
    def is_causal(self) -> bool:
        """Whether its labels are its tokens, not words of another row or classes of tokens."""
        pairs = zip(self.tokens, self.labels, strict=False)
        return len(self.tokens) == len(self.labels) and all(label in (MASKED, token) for token, label in pairs)


def read_rows(loader: Any) -> list[Row]:
    """Return rows with labels of the data that a Trainer's `loader` reads; none of streamed data and other tasks.

    The run is not changed: the random numbers that a collator takes of torch and Python are given back.
    """
    rows: list[Row] = []
    # collators of other people may raise anything where a row comes alone; that is no reason not to train
    with contextlib.suppress(Exception), _same_random_numbers():
        data = loader.dataset
        for at in range(0, len(data), -(-len(data) // READ)):
            rows.extend(_collated(data[at], loader.collate_fn))
    return rows


def _collated(row: Any, collate: Any) -> Iterator[Row]:
    batch = collate([dict(row)])
    tokens, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(labels, torch.Tensor) and isinstance(tokens, torch.Tensor) and labels.dim() > 1:
        seen = row if "input_ids" in row else batch
        all_of_it = torch.as_tensor(seen["input_ids"]).flatten()
        real = torch.as_tensor(seen.get("attention_mask", torch.ones_like(all_of_it))).flatten().bool()
        own = all_of_it[real].tolist()
        yield Row(tokens=tokens.flatten().tolist(), labels=labels.flatten().tolist(), own=own)


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


def label_findings(rows: Sequence[Row], words: Any, *, are_all: bool) -> Iterator[Finding]:
    """Yield what the labels of `rows` cannot teach; `words` is the tokenizer, and the rows may be `are_all` there are."""
    bare = sum(not row.has_labels for row in rows)
    if bare * 2 >= len(rows) > 0:
        hint = "check the collator and the chat template, or raise max_length: the answers may be cut off"
        severity = Severity.ERROR if are_all and bare == len(rows) else Severity.WARNING
        yield trap("no-labels", hint, where="train data", severity=severity, share=f"{bare} of {len(rows)}")
    end = getattr(words, "eos_token_id", None)
    ended = [row for row in rows if row.is_causal and row.has_labels and end in row.own[1:]]
    if ended and not any(end in row.labels for row in ended):
        is_pad = end == getattr(words, "pad_token_id", None)
        why = "pad_token is eos_token, and the collator masks padding" if is_pad else "the collator masks it"
        hint = "set tokenizer.pad_token to an unused token of the vocabulary, or mask padding by attention_mask"
        hint = hint if is_pad else "let the labels include the end of each answer"
        share = f"{len(ended)} of {len(rows)}"
        yield trap("eos-masked", hint, where="train data", token=words.eos_token, share=share, why=why)


def one_row(loader: Any, rows: Sequence[Row], words: Any) -> list[str]:
    """Return the first row as text: its labels in double brackets, or the columns that a method compares."""
    first: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        first = dict(next(iter(loader.dataset)))
        rows = rows or list(_collated(first, loader.collate_fn))
    if rows and rows[0].is_causal:
        return [_marked(rows[0].tokens, rows[0].labels, words)]
    texts = {}
    for name, value in first.items():
        column = name.removesuffix("_ids").removesuffix("_input")
        if name.endswith("_ids") and isinstance(value, list):
            texts[column] = _marked(value, first.get(f"{column}_labels", [MASKED] * len(value)), words)
    return [f"{name}: {text}" for name, text in (texts or _texts(first, words)).items()]


def _marked(tokens: Sequence[int], labels: Sequence[int], words: Any) -> str:
    pairs = groupby(zip(tokens, labels, strict=True), key=lambda pair: pair[1] != MASKED)
    parts = [(learned, words.decode([token for token, _ in pair])) for learned, pair in pairs]
    return _cut("".join(f"[[{text}]]" if learned else text for learned, text in parts))


def _texts(row: Mapping[str, Any], words: Any) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in row.items():
        if isinstance(value, str):
            texts[name] = _cut(value)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping) and words.chat_template:
            text = words.apply_chat_template(value, tokenize=False, add_generation_prompt=name == "prompt")
            texts[name] = _cut(text)
    return texts


def _cut(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} … {text[-_SHOWN:]}"
