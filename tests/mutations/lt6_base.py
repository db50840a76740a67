"""LT621 to LT624: a model folder against its base, whoever made it."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint_edits import raw
from tests.mutations.merged_models import NORM, base_of, weights, without_manifest
from tests.mutations.registry import CAUSAL_MERGED, MERGED, Edit, breaks, enter


@breaks("LT623", CAUSAL_MERGED, with_base=True, adapters=())
def _turned(folder: Path) -> None:
    without_manifest(folder, unknown=True)
    with weights(folder) as table:
        tensor = table["model.layers.0.mlp.down_proj.weight"]
        table["model.layers.0.mlp.down_proj.weight"] = raw(*reversed(tensor.shape), dtype=tensor.dtype)


@breaks("LT624", CAUSAL_MERGED, with_base=True, adapters=(), deep=True)
def _renamed_base(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        table.update(base_of(folder))


@breaks("LT624 but for its head", MERGED, with_base=True, adapters=(), quiet=True)
def _head_on_the_base(folder: Path) -> None:
    without_manifest(folder)
    with weights(folder) as table:
        table.update({name: tensor for name, tensor in base_of(folder).items() if name in table})


EDITS = {
    "LT621": Edit(
        CAUSAL_MERGED,
        by=lambda folder: without_manifest(folder, unknown=True),
        removed=[NORM],
        with_base=True,
        options={"adapters": ()},
    ),
    "LT622": Edit(
        CAUSAL_MERGED,
        by=lambda folder: without_manifest(folder, unknown=True),
        tensors={"model.layers.0.self_attn.q_proj.bias": raw(16)},
        with_base=True,
        options={"adapters": ()},
    ),
}
enter(__name__, EDITS)
