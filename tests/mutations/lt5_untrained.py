"""LT505: what the adapter's config names in the base, and the file does not have."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import PREFIX, fields, raw, tensors
from tests.mutations.registry import CAUSAL, breaks


@breaks("LT505", CAUSAL, with_base=True)
def _layer_lost(folder: Path) -> None:
    with tensors(folder) as table:
        for name in [name for name in table if "layers.1.mlp.down_proj" in name]:
            del table[name]


@breaks("LT505 saved in part", CAUSAL, with_base=True)
def _one_norm_lost(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.layers.0.input_layernorm.weight"] = raw(16)
    with fields(folder) as config:
        config["modules_to_save"] = ["input_layernorm"]


@breaks("LT505 output layer", CAUSAL, with_base=True)
def _output_layer_without_its_lora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}lm_head.base_layer.weight"] = raw(304, 16)
    with fields(folder) as config:
        config["target_modules"] = [*config["target_modules"], "lm_head"]
