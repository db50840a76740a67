"""The tensors of a model folder against its class, its config and one another."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.checkpoint_edits import INDEX, fields, raw, tensors
from tests.mutations.merged_models import Q_PROJ, SCORE, quantised, weights, without_manifest
from tests.mutations.registry import CAUSAL, CAUSAL_MERGED, FIXTURES, MERGED, SHARDED, breaks


@breaks("LT317", MERGED)
def _head_of_a_wider_model(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        table[SCORE] = raw(1, 24, dtype="BF16")


@breaks("LT317 short projection", SHARDED)
def _short_projection(folder: Path) -> None:
    with weights(folder) as table:
        table["model.layers.1.self_attn.o_proj.weight"] = raw(8, 16)


@breaks("LT317 flat head", MERGED)
def _flat_head(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        table[SCORE] = raw(16, dtype="BF16")


@breaks("LT318", CAUSAL_MERGED)
def _lost_norm(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        del table["model.norm.weight"]


@breaks("LT318 of the biases", MERGED)
def _lost_bias(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        del table["model.layers.1.self_attn.k_proj.bias"]


@breaks("LT319", CAUSAL_MERGED)
def _of_another_trainer(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        table["v_head.summary.weight"] = raw(1, 16)


@breaks("LT318 wrapped", CAUSAL, with_base=True)
def _wrapped_base(folder: Path) -> None:
    base = folder.parent / "base"
    with fields(base, INDEX) as index:
        index["weight_map"] = {f"module.{name}": file for name, file in index["weight_map"].items()}
        files = set(index["weight_map"].values())
    for file in files:
        with tensors(base, file) as table:
            wrapped = {f"module.{name}": tensor for name, tensor in table.items()}
            table.clear()
            table.update(wrapped)


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


@breaks("LT321", SHARDED)
def _merged_by_verl(folder: Path) -> None:
    shutil.copytree(FIXTURES / "causal-llama" / "adapter", folder / "lora_adapter")
