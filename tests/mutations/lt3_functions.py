"""LT324: functions that transformers does not have."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields
from tests.mutations.registry import MODEL, SHARDED, Edit, breaks, enter


@breaks("LT324 layers", MODEL)
def _unknown_layers(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["layer_types"] = ["full_atention"] * config["num_hidden_layers"]


@breaks("LT324 number of layers", MODEL)
def _layers_for_another_depth(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["layer_types"] = ["full_attention"] * (config["num_hidden_layers"] + 1)


EDITS = {
    "LT324": Edit(MODEL, file="config.json", config={"hidden_act": "swilu"}),
    "LT324 rope": Edit(
        SHARDED,
        file="config.json",
        config={"rope_parameters": {"rope_type": "yarm", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "LT324 rope without its factor": Edit(
        SHARDED, file="config.json", config={"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0}}
    ),
    "LT324 code": Edit(MODEL, file="config.json", config={"auto_map": None}),
    "LT324 attention": Edit(MODEL, file="config.json", config={"_attn_implementation": "flash_atention_2"}),
    "LT324 no method": Edit(MODEL, file="config.json", config={"quantization_config": {}}),
}
enter(__name__, EDITS)
