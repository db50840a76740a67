"""LT320: where a language model stops."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields
from tests.mutations.registry import CAUSAL_MERGED, breaks


@breaks("LT320", CAUSAL_MERGED)
def _forget_the_end_of_a_turn(folder: Path) -> None:
    with fields(folder, "generation_config.json") as config:
        config["eos_token_id"] = 2
