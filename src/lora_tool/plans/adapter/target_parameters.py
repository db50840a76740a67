"""LoRA on bare parameters (`target_parameters`): a stack of experts, or a matrix that no linear layer holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig, ExpertLayout
from lora_tool.plans.core.terms import LoraTerm

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts

_STACK = 3
"""Dimensions of a parameter that holds one matrix per expert."""


def parameter_term(
    view: AdapterView, parameter: str, facts: ModelFacts, layer: LoraLayer, layout: ExpertLayout | None
) -> LoraTerm:
    """Return the delta of one parameter; the rules have compared the shapes.

    `layout` is what the user says of lora_B; None to go by the config. Raises `UnsupportedAdapter` where the layout of
    lora_B cannot be known, `WrongValue` where the config says another.
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
        scaling=config.scaling(parameter),
        experts=experts,
        layout=layout_of(config, b, layout) if experts > 1 else ExpertLayout.RANK_MAJOR,
    )


def stack_is_transposed(parameter: str, facts: ModelFacts) -> bool:
    """Return whether a stack of experts is stored as [experts, in, out]."""
    return len(facts.shapes[parameter]) == _STACK and parameter.rpartition(".")[0] in facts.transposed


def layout_of(config: AdapterConfig, b: StoredTensor, asked: ExpertLayout | None = None) -> ExpertLayout:
    """Return how the columns of a fused lora_B belong to experts: as `asked`, else as the config says.

    Raises `WrongValue` where the two differ, `UnsupportedAdapter` where Unsloth wrote it and neither says.
    """
    named = config.expert_layout
    if asked is not None and named not in (None, asked.value):
        raise WrongValue(f'{config.path}: lora_B_layout is {named}, but `expert_layout="{asked}"` was requested')
    if asked is None and named is None and config.by_unsloth:
        raise UnsupportedAdapter(
            f"{b.path}: `{b.name}` was written by Unsloth, which packed the experts' columns in another order until "
            "2026-09. The file does not record which order it has, and the wrong one gives plausible garbage",
            hint=f'write "lora_B_layout" into {config.path.name}: "{ExpertLayout.GROUPED_BY_EXPERT.value}" if it was trained '
            f'before that, "{ExpertLayout.RANK_MAJOR.value}" if after; to merge, `expert_layout="…"` says the same',
        )
    return asked or (ExpertLayout(named) if named else ExpertLayout.RANK_MAJOR)
