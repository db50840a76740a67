"""LT504 and LT513 to LT515: an adapter and its base as one model."""

from __future__ import annotations

from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import INDEX, fields, lora_on_embeddings, raw, tensors
from tests.mutations.registry import CAUSAL, REWARD, Edit, enter


def _tie(folder: Path) -> None:
    """Make the base one whose embeddings are tied, and stored once."""
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        config["tie_word_embeddings"] = True
    _lose(base, "lm_head.weight")


def _lose(base: Path, name: str) -> None:
    with fields(base, INDEX) as index:
        file = index["weight_map"].pop(name)
    with tensors(base, file) as table:
        del table[name]


EDITS = {
    "LT513": Edit(REWARD, copied={"{PREFIX}classifier.weight": "{SCORE}"}, removed=["{SCORE}"], with_base=True),
    "LT514": Edit(
        CAUSAL,
        by=_tie,
        tensors={
            "{PREFIX}model.embed_tokens.weight": raw(304, 16),
            "{PREFIX}lm_head.weight": edit.scaled(raw(304, 16), 2.0),
        },
        with_base=True,
    ),
    "LT514 tokens": Edit(
        CAUSAL,
        by=_tie,
        config={"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}},
        tensors={
            "{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": raw(1, 16),
            "{PREFIX}lm_head.token_adapter.trainable_tokens_delta": raw(1, 16),
        },
        with_base=True,
    ),
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
