"""LT324: functions that transformers does not have."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields
from tests.mutations.registry import MODEL, SHARDED, breaks


@breaks("LT324", MODEL)
def _unknown_activation(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["hidden_act"] = "swilu"


@breaks("LT324 rope", SHARDED)
def _unknown_rope(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["rope_parameters"] = {"rope_type": "yarm", "factor": 2.0, "rope_theta": 1e4}


@breaks("LT324 rope without its factor", SHARDED)
def _rope_without_its_factor(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4}


@breaks("LT324 layers", MODEL)
def _unknown_layers(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["layer_types"] = ["full_atention"] * config["num_hidden_layers"]


@breaks("LT324 number of layers", MODEL)
def _layers_for_another_depth(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["layer_types"] = ["full_attention"] * (config["num_hidden_layers"] + 1)


@breaks("LT324 code", MODEL)
def _null_code(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["auto_map"] = None


@breaks("LT324 attention", MODEL)
def _unknown_attention(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["_attn_implementation"] = "flash_atention_2"


@breaks("LT324 no method", MODEL)
def _quantised_by_nothing(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["quantization_config"] = {}
