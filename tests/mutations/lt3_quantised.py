"""LT322 and LT323: quantised weights of a model, its config and one another."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import fields, raw
from tests.mutations.merged_models import Q_PROJ, quantised, weights
from tests.mutations.registry import SHARDED, breaks


@breaks("LT322", SHARDED)
def _config_of_what_was_dequantised(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@breaks("LT322 compressed-tensors", SHARDED)
def _config_of_what_was_decompressed(folder: Path) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    said = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups}
    with fields(folder, "config.json") as config:
        config["quantization_config"] = said


@breaks("LT322 the scales are lost", SHARDED)
def _scales_lost(folder: Path) -> None:
    with weights(folder) as table:
        table["model.layers.1.mlp.up_proj.weight"] = raw(32, 16, dtype="F8_E4M3")


@breaks("LT323", SHARDED)
def _one_of_three_that_are_fused(folder: Path) -> None:
    quantised(folder, f"{Q_PROJ}.weight")
