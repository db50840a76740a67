"""The adapters of one merge: each with its config and its tensors by their effect, and all of them together.

The deltas of several adapters are summed. What cannot be summed is in one of them only, or the same in all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.adapters.targeting import explains, wrapped_parameters
from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.checkpoints import AdapterDir
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.core.keys import Part, without_wrapped
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.adapter_config import AdapterConfig, ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.plans.core.factor_ops import Mix, averaged_heads, mean_of
from lora_tool.plans.core.operation import BiasTerm, LoraTerm

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts


# LoRA on bare parameters (`target_parameters`): a stack of experts, or a matrix that no linear layer holds.


_STACK = 3
"""Dimensions of a parameter that holds one matrix per expert."""


def parameter_term(
    view: AdapterView, parameter: str, facts: ModelFacts, layer: LoraLayer, layout: ExpertLayout | None, weight: float
) -> LoraTerm:
    """Return the delta of one parameter times the `weight` of its adapter; the rules have compared the shapes.

    `layout` is the user's for lora_B; None to go by the config. Raises `UnsupportedAdapter` where the layout of lora_B
    cannot be known, `WrongValue` where the config says another.
    """
    config = view.config
    a, b = layer.a, layer.b
    if a is None or b is None:
        raise AssertionError("the rules let no half of a pair pass")
    shape = facts.shapes[parameter]
    experts = shape[0] if len(shape) == _STACK else 1
    return LoraTerm(
        a=a,
        b=b,
        scaling=weight * config.scaling(parameter),
        experts=experts,
        layout=layout_of(config, b, layout) if experts > 1 else ExpertLayout.RANK_MAJOR,
    )


def stack_is_transposed(parameter: str, facts: ModelFacts) -> bool:
    """Return whether a stack of experts is stored as [experts, in, out]."""
    return len(facts.shapes[parameter]) == _STACK and parameter.rpartition(".")[0] in facts.transposed


def layout_of(config: AdapterConfig, b: StoredTensor, requested: ExpertLayout | None = None) -> ExpertLayout:
    """Return how the columns of a fused lora_B belong to experts: as `requested`, else as the config says.

    Raises `WrongValue` where the two differ, `UnsupportedAdapter` where Unsloth wrote it and neither says.
    """
    named = config.expert_layout
    if requested is not None and named not in (None, requested.value):
        raise WrongValue(f'{config.path}: lora_B_layout is {named}, but `expert_layout="{requested}"` was requested')
    if requested is None and named is None and config.by_unsloth:
        raise UnsupportedAdapter(
            f"{b.path}: `{b.name}` was written by Unsloth, which packed the experts' columns in another order until "
            "2026-09. The file does not record which order it has, and the wrong one gives plausible garbage",
            hint=f'write "lora_B_layout" into {config.path.name}: "{ExpertLayout.GROUPED_BY_EXPERT.value}" if it was trained '
            f'before that, "{ExpertLayout.RANK_MAJOR.value}" if after; to merge, `expert_layout="…"` says the same',
        )
    return requested or (ExpertLayout(named) if named else ExpertLayout.RANK_MAJOR)


# An adapter's changes of a model, in the terms of a plan. Each of its tensors appears here once.


class AdapterModules(Struct, frozen=True, kw_only=True):
    """An adapter's changes, by module path (LoRA) and by the model's own tensor name (whole tensors)."""

    lora: Mapping[str, tuple[LoraTerm, ...]] = field(default_factory=dict)
    """One term of each adapter that has LoRA on the module."""
    lora_bias: Mapping[str, tuple[BiasTerm, ...]] = field(default_factory=dict)
    magnitudes: Mapping[str, StoredTensor] = field(default_factory=dict)
    """DoRA's magnitude vectors, by module path."""
    saved: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors that replace the base's, or are added to it: `modules_to_save`, the head."""
    means: Mapping[str, Mix] = field(default_factory=dict)
    """Those of them that are averaged, because several adapters have others."""
    frozen_base: Mapping[str, StoredTensor] = field(default_factory=dict)
    """`X.base_layer.weight`: the frozen tensor under the LoRA of X, where the adapter carries it."""
    embeddings: frozenset[str] = frozenset()
    """Modules whose LoRA is an embedding's: A is [r, rows], B is [columns, r]."""
    tokens: Mapping[str, StoredTensor] = field(default_factory=dict)
    """The rows of `trainable_token_indices`, by module path."""
    parameters: Mapping[str, tuple[LoraTerm, ...]] = field(default_factory=dict)
    """LoRA on bare parameters, by their names."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Adapter tensor → why the merge leaves it out: a repeat, or a frozen original that PEFT leaves out too."""

    def without(self, tensors: Collection[StoredTensor]) -> AdapterModules:
        """Return the same without these whole tensors."""

        def kept(table: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
            return {name: tensor for name, tensor in table.items() if tensor not in tensors}

        return replace(self, saved=kept(self.saved), frozen_base=kept(self.frozen_base), tokens=kept(self.tokens))

    def without_lora(self, module: str) -> AdapterModules:
        """Return the same without the LoRA on a module."""
        return replace(self, lora={name: terms for name, terms in self.lora.items() if name != module})


def adapter_modules(
    view: AdapterView,
    *,
    base: TensorTable,
    facts: ModelFacts | None = None,
    expert_layout: ExpertLayout | None = None,
    ends: frozenset[str] = frozenset(),
    weight: float = 1.0,
) -> AdapterModules:
    """Return the adapter's tensors by their effect; the rules have judged them.

    `weight` is the adapter's in a sum: all of its terms are scaled by it, whole tensors stay as they are.
    `facts` tell which parameter a LoRA on bare parameters belongs to; `expert_layout` is the user's for a fused lora_B.
    `ends` are the base's tensors with a row per token: PEFT saves them unasked after the vocabulary was resized, and
    loads them over the base's. `base` are all of its tensors; an adapter may repeat some. Raises as
    `parameter_term`.
    """
    layers = {layer.module: layer for layer in view.layers}
    parameters: dict[str, tuple[LoraTerm, ...]] = {}
    for module, name in wrapped_parameters(view.config, facts.parameters).items() if facts else ():
        if facts and module in layers:
            term = parameter_term(view, name, facts, layers.pop(module), expert_layout, weight)
            parameters[name] = (term,)
    lora: dict[str, tuple[LoraTerm, ...]] = {}
    biases: dict[str, tuple[BiasTerm, ...]] = {}
    magnitudes: dict[str, StoredTensor] = {}
    embeddings: set[str] = set()
    for path, layer in layers.items():
        module = without_wrapped(path)
        lora[module] = (_term(layer, weight),)
        if layer.bias is not None:
            biases[module] = (BiasTerm(bias=layer.bias, scaling=lora[module][0].scaling),)
        if layer.magnitude is not None:
            magnitudes[module] = layer.magnitude
        if layer.embedding:
            embeddings.add(module)
    dropped = {name: f"a copy of {first.name}, which is in the file too" for name, first in view.repeats.items()}
    for item in view.parts(Part.ORIGINAL_MODULE):
        dropped[item.tensor.name] = "the frozen original of a saved module; PEFT does not load it either"
    repeated = set()
    for item in view.parts(Part.PLAIN):
        if item.name not in ends and not explains(view.config, item) and _repeats(item.name, item.tensor, base):
            repeated.add(item.tensor.name)
            dropped[item.tensor.name] = "the base's own, which is there already"
    return AdapterModules(
        lora=lora,
        lora_bias=biases,
        magnitudes=magnitudes,
        saved={name: tensor for name, tensor in view.saved.items() if tensor.name not in repeated},
        frozen_base=view.frozen,
        embeddings=frozenset(embeddings),
        tokens={module: tokens.rows for module, tokens in view.tokens.items()},
        parameters=parameters,
        dropped=dropped,
    )


def _repeats(name: str, tensor: StoredTensor, base: TensorTable) -> bool:
    """Return whether an unexplained tensor is the base's: PEFT saves whatever the first layer holds with embeddings."""
    held = base.get(name)
    return held is not None and same_values(held, tensor)


def _term(layer: LoraLayer, weight: float) -> LoraTerm:
    if layer.a is None or layer.b is None or layer.scaling is None:
        raise AssertionError("the rules let no half of a pair pass")
    return LoraTerm(a=layer.a, b=layer.b, scaling=weight * layer.scaling)


_Value = TypeVar("_Value")


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
        """Embedding module → the rows that this adapter trained (`trainable_token_indices`)."""
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
    modules = part.modules
    bare = AdapterModules(saved=modules.saved, frozen_base=modules.frozen_base, tokens=modules.tokens, dropped=dropped)
    return replace(part, modules=bare)


def join(adapted: Sequence[Adapted], *, average: bool = False) -> tuple[tuple[Adapted, ...], AdapterModules]:
    """Return the adapters without the tensors that an earlier one holds too, and the changes of all of them together.

    Terms are in the order of the adapters; rule LT512 saw that no two of them contradict each other. With `average` heads
    that differ are averaged.
    """
    if len(adapted) == 1:
        return tuple(adapted), replace(adapted[0].modules, dropped={})
    means = _means(adapted) if average else {}
    kept: list[Adapted] = []
    for part in adapted:
        kept.append(_without_repeated(part, kept, means))
    modules = [part.modules for part in kept]
    return tuple(kept), AdapterModules(
        lora=_summed(each.lora for each in modules),
        lora_bias=_summed(each.lora_bias for each in modules),
        magnitudes=_union(each.magnitudes for each in modules),
        saved=_union(each.saved for each in modules),
        means=means,
        frozen_base=_union(each.frozen_base for each in modules),
        embeddings=frozenset().union(*(each.embeddings for each in modules)),
        tokens=_union(each.tokens for each in modules),
        parameters=_summed(each.parameters for each in modules),
    )


def require_saved_in_first(adapted: Sequence[Adapted]) -> None:
    """Raise `UnsupportedAdapter` where only a later adapter saved a module whole.

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


def _means(adapted: Sequence[Adapted]) -> dict[str, Mix]:
    """Return what averages the heads that all adapters have, and whose values differ."""
    weights = [part.weight for part in adapted]
    return {name: mean_of(held, weights) for name, held in averaged_heads([part.modules.saved for part in adapted])}


def _without_repeated(part: Adapted, earlier: Sequence[Adapted], means: Collection[str]) -> Adapted:
    """Return the adapter without the whole tensors that an earlier one holds with the same values."""
    repeated = [
        tensor
        for each in earlier
        for mine, other in (
            (part.modules.saved, each.modules.saved),
            (part.modules.frozen_base, each.modules.frozen_base),
        )
        for name, tensor in mine.items()
        if name in other and name not in means
    ]
    return part.without(repeated, "an earlier adapter holds it with the same values") if repeated else part


def _summed(tables: Iterator[Mapping[str, tuple[_Value, ...]]]) -> dict[str, tuple[_Value, ...]]:
    joined: dict[str, tuple[_Value, ...]] = {}
    for table in tables:
        for module, terms in table.items():
            joined[module] = (*joined.get(module, ()), *terms)
    return joined


def _union(tables: Iterator[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    return {name: tensor for table in tables for name, tensor in table.items()}
