"""LT325 and LT326: a tokenizer that is not the base's, or that is nowhere."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields
from tests.mutations.registry import CAUSAL, MODEL, RUN, Edit, breaks, enter


@breaks("LT325", CAUSAL, with_base=True)
def _two_words_swapped(folder: Path) -> None:
    with fields(folder, "tokenizer.json") as tokenizer:
        words = tokenizer["model"]["vocab"]
        one, other = list(words)[100:102]
        words[one], words[other] = words[other], words[one]


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def _without_tokenizer(folder: Path) -> None:
    for each in (folder, folder.parent / "base"):
        for name in _TOKENIZER:
            (each / name).unlink(missing_ok=True)


EDITS = {
    "LT326": Edit(MODEL, gone=_TOKENIZER, quiet=True),
    "LT326 save of a run": Edit(RUN, by=_without_tokenizer, quiet=True),
}
enter(__name__, EDITS)
