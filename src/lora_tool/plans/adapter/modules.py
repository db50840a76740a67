"""What an adapter does to a model, in the terms of a plan. Each of its tensors appears here once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.adapters.targeting import explains, wrapped_parameters
from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.core.keys import Part, without_wrapped
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.plans.adapter.target_parameters import parameter_term
from lora_tool.plans.core.terms import BiasTerm, LoraTerm

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts


class AdapterModules(Struct, frozen=True, kw_only=True):
    """What an adapter does, by module path (LoRA) and by the model's own tensor name (whole tensors)."""

    lora: Mapping[str, tuple[LoraTerm, ...]]
    """One term of each adapter that has LoRA on the module."""
    lora_bias: Mapping[str, tuple[BiasTerm, ...]]
    magnitudes: Mapping[str, StoredTensor]
    """DoRA's magnitude vectors, by module path."""
    saved: Mapping[str, StoredTensor]
    """Tensors that replace the base's, or are added to it: `modules_to_save`, the head."""
    frozen_base: Mapping[str, StoredTensor]
    """`X.base_layer.weight`: the frozen tensor under the LoRA of X, where the adapter carries it."""
    embeddings: frozenset[str]
    """Modules whose LoRA is an embedding's: A is [r, rows], B is [columns, r]."""
    tokens: Mapping[str, StoredTensor]
    """Rows trained by themselves, by module path."""
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
    """Return the adapter's tensors by what they do; the rules have judged them.

    `weight` is the adapter's in a sum: all of its terms are scaled by it, whole tensors stay as they are.
    `facts` tell which parameter a LoRA on bare parameters belongs to; `expert_layout` is what the user says of a fused
    lora_B. `ends` are the base's tensors with a row per token, which PEFT saves by itself after the vocabulary was
    resized, and loads over the base's; `base` are all of its tensors, some of which an adapter may repeat. Raises as
    `parameter_term`.
    """
    layers = {layer.module: layer for layer in view.layers}
    wrapped = wrapped_parameters(view.config, facts.parameters) if facts else {}
    parameters = {
        name: (_weighted_term(parameter_term(view, name, facts, layers.pop(module), expert_layout), weight),)
        for module, name in wrapped.items()
        if facts and module in layers
    }
    layers = {without_wrapped(module): layer for module, layer in layers.items()}
    repeated = {
        item.tensor.name: "the base's own, which is there already"
        for item in view.parts(Part.PLAIN)
        if item.name not in ends and not explains(view.config, item) and _repeats(item.name, item.tensor, base)
    }
    originals = (item.tensor.name for item in view.parts(Part.ORIGINAL_MODULE))
    return AdapterModules(
        lora={module: (_weighted_term(_term(layer), weight),) for module, layer in layers.items()},
        lora_bias={
            module: (BiasTerm(bias=layer.bias, scaling=weight * _term(layer).scaling),)
            for module, layer in layers.items()
            if layer.bias is not None
        },
        magnitudes={module: layer.magnitude for module, layer in layers.items() if layer.magnitude is not None},
        saved={name: tensor for name, tensor in view.saved.items() if tensor.name not in repeated},
        frozen_base=view.frozen,
        embeddings=frozenset(module for module, layer in layers.items() if layer.embedding),
        tokens={module: tokens.rows for module, tokens in view.tokens.items()},
        parameters=parameters,
        dropped={
            **{name: f"a copy of {first.name}, which is in the file too" for name, first in view.repeats.items()},
            **dict.fromkeys(originals, "the frozen original of a saved module; PEFT does not load it either"),
            **repeated,
        },
    )


def _weighted_term(term: LoraTerm, weight: float) -> LoraTerm:
    """Return the term times the weight of its adapter."""
    return term if weight == 1 else replace(term, scaling=weight * term.scaling)


def _repeats(name: str, tensor: StoredTensor, base: TensorTable) -> bool:
    """Return whether an unexplained tensor is the base's: PEFT saves whatever the first layer holds with embeddings."""
    held = base.get(name)
    return held is not None and same_values(held, tensor)


def _term(layer: LoraLayer) -> LoraTerm:
    if layer.a is None or layer.b is None or layer.scaling is None:
        raise AssertionError("the rules let no half of a pair pass")
    return LoraTerm(a=layer.a, b=layer.b, scaling=layer.scaling)
