"""The shape of a layer's ΔW, and the weight of the base that it is added to."""

from __future__ import annotations

from lora_tool.adapters.view import LoraLayer
from lora_tool.core.tensors import StoredTensor
from lora_tool.models.ends import embeddings
from lora_tool.rules.engine.subjects import BaseMatch


def held_or_tied(match: BaseMatch, module: str) -> StoredTensor | None:
    """Return the base's weight of a module; for an output layer that is not on disk, the embedding it is tied to."""
    held = match.tensor(module)
    if held is not None or f"{match.name(module)}.weight" not in match.arch.causal_only:
        return held
    inputs = embeddings(match.base, match.arch)
    return inputs[0] if len(inputs) == 1 else None


def delta_shape(
    match: BaseMatch, layer: LoraLayer, pair: tuple[StoredTensor, StoredTensor], *, bare: bool
) -> tuple[int, ...]:
    """Return the shape of lora_B·lora_A as the weight is stored; a `bare` parameter is not a Conv1D's weight to PEFT."""
    a, b = pair
    conv1d = match.arch.conv1d
    is_conv1d = not conv1d.isdisjoint({layer.target, layer.target.rpartition(".")[2]})
    transposed = layer.embedding or (is_conv1d and not bare)
    return (a.shape[1], b.shape[0], *a.shape[2:]) if transposed else (b.shape[0], a.shape[1], *a.shape[2:])
