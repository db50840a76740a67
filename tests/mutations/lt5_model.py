"""LT504 and LT513 to LT515: an adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import INDEX, PREFIX, fields, lora_on_embeddings, raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, Edit, breaks, enter


@breaks("LT513", REWARD, with_base=True)
def _head_under_another_name(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}classifier.weight"] = table.pop(places.SCORE)


@breaks("LT514", CAUSAL, with_base=True)
def _two_ends_for_one(folder: Path) -> None:
    _tie(folder.parent / "base")
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.weight"] = raw(304, 16)
        table[f"{PREFIX}lm_head.weight"] = edit.scaled(raw(304, 16), 2.0)


@breaks("LT514 tokens", CAUSAL, with_base=True)
def _other_tokens_of_one_end(folder: Path) -> None:
    _tie(folder.parent / "base")
    with fields(folder) as config:
        config["trainable_token_indices"] = {"embed_tokens": [1], "lm_head": [2]}
    with tensors(folder) as table:
        for end in ("model.embed_tokens", "lm_head"):
            table[f"{PREFIX}{end}.token_adapter.trainable_tokens_delta"] = raw(1, 16)


def _tie(base: Path) -> None:
    """Make the base one whose embeddings are tied, and stored once."""
    with fields(base, "config.json") as config:
        config["tie_word_embeddings"] = True
    _lose(base, "lm_head.weight")


def _lose(base: Path, name: str) -> None:
    with fields(base, INDEX) as index:
        file = index["weight_map"].pop(name)
    with tensors(base, file) as table:
        del table[name]


EDITS = {
    "LT504": Edit(
        CAUSAL,
        config={"modules_to_save": ["embed_tokens"]},
        tensors={"{PREFIX}model.embed_tokens.weight": raw(290, 16)},
        with_base=True,
    ),
    "LT504 under LoRA": Edit(CAUSAL, by=lambda folder: lora_on_embeddings(folder, rows=310), with_base=True),
    "LT504 torn": Edit(
        CAUSAL,
        config={"modules_to_save": ["embed_tokens", "lm_head"]},
        tensors={"{PREFIX}model.embed_tokens.weight": raw(310, 16), "{PREFIX}lm_head.weight": raw(312, 16)},
        with_base=True,
    ),
    "LT504 one end": Edit(
        CAUSAL,
        config={"modules_to_save": ["embed_tokens"]},
        tensors={"{PREFIX}model.embed_tokens.weight": raw(310, 16)},
        with_base=True,
    ),
    "LT513 bias": Edit(REWARD, tensors={"{PREFIX}score.bias": raw(1)}, with_base=True),
    "LT513 labels": Edit(REWARD, tensors={"{PREFIX}score.bias": raw(2)}, with_base=True),
    "LT515": Edit(CAUSAL, by=lambda folder: _lose(folder.parent / "base", "model.norm.weight"), with_base=True),
}
enter(__name__, EDITS)
