"""Modules whose weights a server has in one matrix, and whose LoRA it reads only together.

SGLang's `normalize_qkv_proj` and `normalize_gate_up_proj` (`python/sglang/srt/lora/lora.py`, 0.5.23) start from the LoRA
on q and on gate: without them the first request with LoRA on k, v or up ends the server, and without LoRA on v the
adapter does not load. For experts, `lora_manager.py` wants both of their matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from lora_tool.adapter.experts import EXPERT, PROJECTIONS
from lora_tool.checkpoint import ModelDir
from lora_tool.checkpoint.quantised import as_matrices
from lora_tool.keys import split_layer
from lora_tool.tensors import StoredTensor

_BESIDE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",)}
)
"""Module → those that must have LoRA where it has. SGLang itself adds zeros for k and for up."""
_BESIDE_IN_EXPERTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gate_proj": ("down_proj",), "up_proj": ("gate_proj", "down_proj"), "down_proj": ("gate_proj",)}
)
_MIXTRALS = frozenset(PROJECTIONS[1])


def lacking(modules: Iterable[str]) -> Mapping[str, str]:
    """Return which modules have no LoRA, though another is read only together with them, and that other.

    Only the base tells whether it has them at all: some models have no gate.
    """
    held, found = dict.fromkeys(modules), dict[str, str]()
    for module in held:
        parent, _, leaf = module.rpartition(".")
        beside = _BESIDE_IN_EXPERTS if EXPERT.fullmatch(module) else _BESIDE
        for name in beside.get(leaf, ()):
            if f"{parent}.{name}" not in held:
                found.setdefault(f"{parent}.{name}", module)
    return found


def without_names(modules: Iterable[str]) -> Iterator[str]:
    """Yield the matrices of experts under Mixtral's names, which SGLang's `target_modules` do not reach."""
    matches = ((module, EXPERT.fullmatch(module)) for module in modules)
    return (module for module, match in matches if match and match["projection"] in _MIXTRALS)


def weight_beside(base: ModelDir, module: str, width: int) -> StoredTensor | None:
    """Return the base's weight of a module, by its path or by where it is in its layer; None where the base has none.

    A multimodal base may have several of them; `width` columns tell which is meant.
    """
    tensors = as_matrices(base).tensors
    exact = tensors.get(f"{module}.weight")
    number, _ = split_layer(module)
    if exact is not None or number is None:
        return exact
    ending = f".{number}.{module.partition(f'.{number}.')[2]}.weight"
    found = [tensor for name, tensor in tensors.items() if name.endswith(ending)]
    return next((each for each in found if len(found) == 1 or each.shape[1] == width), None)
