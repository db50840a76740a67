"""LT317 to LT319: the tensors of a model folder and its class."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import INDEX, fields, raw, tensors
from tests.mutations.merged_models import SCORE, weights, without_manifest
from tests.mutations.registry import CAUSAL, CAUSAL_MERGED, MERGED, SHARDED, breaks


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
