"""LT325: a tokenizer that is not the base's."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields
from tests.mutations.registry import CAUSAL, breaks


@breaks("LT325", CAUSAL, with_base=True)
def _two_words_swapped(folder: Path) -> None:
    with fields(folder, "tokenizer.json") as tokenizer:
        words = tokenizer["model"]["vocab"]
        one, other = list(words)[100:102]
        words[one], words[other] = words[other], words[one]
