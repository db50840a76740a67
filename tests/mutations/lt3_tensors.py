"""The tensors of a model folder against its class, its config and one another."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.checkpoint_edits import INDEX, fields, raw, tensors
from tests.mutations.merged_models import Q_PROJ, SCORE, quantised, without_manifest
from tests.mutations.registry import CAUSAL, CAUSAL_MERGED, FIXTURES, MERGED, SHARDED, Edit, breaks, enter


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


@breaks("LT322 compressed-tensors", SHARDED)
def _config_of_what_was_decompressed(folder: Path) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
    said = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups}
    with fields(folder, "config.json") as config:
        config["quantization_config"] = said


EDITS = {
    "LT317 of the base": Edit(CAUSAL, base={"hidden_size": 32}, with_base=True),
    "LT317": Edit(MERGED, by=without_manifest, tensors={SCORE: raw(1, 24, dtype="BF16")}),
    "LT317 short projection": Edit(SHARDED, tensors={"model.layers.1.self_attn.o_proj.weight": raw(8, 16)}),
    "LT317 flat head": Edit(MERGED, by=without_manifest, tensors={SCORE: raw(16, dtype="BF16")}),
    "LT318": Edit(CAUSAL_MERGED, by=without_manifest, removed=["model.norm.weight"]),
    "LT318 of the biases": Edit(MERGED, by=without_manifest, removed=["model.layers.1.self_attn.k_proj.bias"]),
    "LT319": Edit(CAUSAL_MERGED, by=without_manifest, tensors={"v_head.summary.weight": raw(1, 16)}),
    "LT322": Edit(
        SHARDED,
        file="config.json",
        config={"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    ),
    "LT322 the scales are lost": Edit(
        SHARDED, tensors={"model.layers.1.mlp.up_proj.weight": raw(32, 16, dtype="F8_E4M3")}
    ),
    "LT323": Edit(SHARDED, by=lambda folder: quantised(folder, f"{Q_PROJ}.weight")),
    "LT321": Edit(
        SHARDED, by=lambda folder: shutil.copytree(FIXTURES / "causal-llama" / "adapter", folder / "lora_adapter")
    ),
}
enter(__name__, EDITS)
