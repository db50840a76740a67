"""LT2xx: the config of an adapter names what has no tensors, or what lies in what it names."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import PREFIX, fields, raw, tensors
from tests.mutations.registry import CAUSAL, breaks


@breaks("LT205", CAUSAL)
def _target_without_tensors(folder: Path) -> None:
    with fields(folder) as config:
        config["target_modules"].append("c_attn")


@breaks("LT205 saved", CAUSAL, with_base=True)
def _saved_module_of_the_base_without_tensors(folder: Path) -> None:
    with fields(folder) as config:
        config["modules_to_save"] = ["up_proj"]


@breaks("LT205 saved inside", CAUSAL)
def _saved_inside_what_is_saved(folder: Path) -> None:
    with fields(folder) as config:
        config["modules_to_save"] = ["vision", "merger"]
    with tensors(folder) as table:
        table[f"{PREFIX}model.vision.merger.weight"] = raw(32, 16)
