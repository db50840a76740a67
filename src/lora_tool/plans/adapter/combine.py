"""The adapters of one merge: each with its config and its tensors by what they do, and all of them together.

The deltas of several adapters are summed. What cannot be summed is in one of them only, or the same in all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import AdapterDir
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.plans.adapter.modules import AdapterModules
from lora_tool.plans.core.terms import LoraTerm

Value = TypeVar("Value")


class Adapted(Struct, frozen=True, kw_only=True):
    """One adapter of a merge."""

    view: AdapterView
    modules: AdapterModules
    weight: float = 1.0
    """Its weight in the sum, which its terms hold."""

    @property
    def adapter(self) -> AdapterDir:
        """Its folder."""
        return self.view.adapter

    @property
    def config(self) -> AdapterConfig:
        """Its config, which the rules found whole."""
        return self.view.config

    @property
    def tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Embedding module → the rows that this adapter trained by themselves."""
        return {module: self.view.tokens[module].indices for module in self.modules.tokens}

    def without(self, tensors: Collection[StoredTensor], reason: str) -> Adapted:
        """Return the same adapter with these of its whole tensors dropped, for the reason."""
        mine = [tensor for tensor in tensors if self.adapter.tensors.get(tensor.name) == tensor]
        dropped = {**self.modules.dropped, **{tensor.name: reason for tensor in mine}}
        return replace(self, modules=replace(self.modules.without(mine), dropped=dropped))

    def without_lora(self, module: str, reason: str) -> Adapted:
        """Return the same adapter with its LoRA on a module dropped, for the reason."""
        factors = [factor for term in self.modules.lora.get(module, ()) for factor in (term.a, term.b)]
        dropped = {**self.modules.dropped, **{factor.name: reason for factor in factors}}
        return replace(self, modules=replace(self.modules.without_lora(module), dropped=dropped))


def without_delta(part: Adapted) -> Adapted:
    """Return the adapter with only its heads and other whole tensors, for a server that adds ΔW itself."""
    tensors = [tensor for layer in part.view.layers for tensor in layer.parts.values()]
    dropped = {**part.modules.dropped, **{tensor.name: "the server of the adapter adds ΔW" for tensor in tensors}}
    nothing: dict[str, tuple[LoraTerm, ...]] = {}
    bare = replace(part.modules, lora=nothing, parameters=nothing, lora_bias={}, magnitudes={}, embeddings=frozenset())
    return replace(part, modules=replace(bare, dropped=dropped))


def join(adapted: Sequence[Adapted]) -> tuple[tuple[Adapted, ...], AdapterModules]:
    """Return the adapters with the tensors dropped that an earlier one holds too, and what all of them do together.

    Terms are in the order of the adapters; rule LT512 saw that no two of them contradict each other.
    """
    if len(adapted) == 1:
        return tuple(adapted), replace(adapted[0].modules, dropped={})
    kept: list[Adapted] = []
    for part in adapted:
        kept.append(_without_repeated(part, kept))
    modules = [part.modules for part in kept]
    return tuple(kept), AdapterModules(
        lora=_summed(each.lora for each in modules),
        lora_bias=_summed(each.lora_bias for each in modules),
        magnitudes=_union(each.magnitudes for each in modules),
        saved=_union(each.saved for each in modules),
        frozen_base=_union(each.frozen_base for each in modules),
        embeddings=frozenset().union(*(each.embeddings for each in modules)),
        tokens=_union(each.tokens for each in modules),
        parameters=_summed(each.parameters for each in modules),
        dropped={},
    )


def require_saved_in_first(adapted: Sequence[Adapted]) -> None:
    """Raise `UnsupportedAdapter` where a later adapter alone saved a module whole.

    PEFT takes saved modules from the active adapter, which is the first, and silently leaves out the others'
    (peft 0.21, `ModulesToSaveWrapper.unload_and_optionally_merge_module`).
    """
    for part in adapted[1:]:
        for name, tensor in part.modules.saved.items():
            if part.config.saves(name) or part.config.saves(name.rpartition(".")[0]):
                raise UnsupportedAdapter(
                    f"{tensor.path}: `{tensor.name}` is saved whole, and of several adapters PEFT takes such modules "
                    f"only from the first: it would leave this one out",
                    hint=f'give {part.adapter.root} first, or merge without `precision="peft"`',
                )


def _without_repeated(part: Adapted, earlier: Sequence[Adapted]) -> Adapted:
    """Return the adapter without the whole tensors that an earlier one holds with the same values."""
    repeated = [
        tensor
        for each in earlier
        for mine, other in (
            (part.modules.saved, each.modules.saved),
            (part.modules.frozen_base, each.modules.frozen_base),
        )
        for name, tensor in mine.items()
        if name in other
    ]
    return part.without(repeated, "an earlier adapter holds it with the same values") if repeated else part


def _summed(tables: Iterator[Mapping[str, tuple[Value, ...]]]) -> dict[str, tuple[Value, ...]]:
    joined: dict[str, tuple[Value, ...]] = {}
    for table in tables:
        for module, terms in table.items():
            joined[module] = (*joined.get(module, ()), *terms)
    return joined


def _union(tables: Iterator[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    return {name: tensor for table in tables for name, tensor in table.items()}
