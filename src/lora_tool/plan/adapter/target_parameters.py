"""LoRA on bare parameters (`target_parameters`): a stack of experts, or a matrix that no linear layer holds.

PEFT wraps a module once per targeted parameter, one wrapper around the other, so the tensors' names say how deep they
lie and not which parameter they belong to: the last parameter of the module is outermost (peft 0.21,
`BaseTuner._inject_parameters`).
"""

from __future__ import annotations

from collections import defaultdict

from lora_tool.adapter.support import OTHER_BASE
from lora_tool.adapter.targeting import parameter_is_targeted
from lora_tool.adapter.view import AdapterView, LoraLayer
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig, ExpertLayout
from lora_tool.names.model import ModelFacts
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.tensors import StoredTensor

_MATRIX, _STACK = 2, 3


def targeted_parameters(config: AdapterConfig, facts: ModelFacts) -> dict[str, str]:
    """Return path of the wrapper, as in the adapter's names → the parameter that it adapts."""
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in facts.shapes:
        if name not in facts.buffers and parameter_is_targeted(config, name):
            by_module[name.rpartition(".")[0]].append(name)
    return {
        module + ".base_layer" * depth: name
        for module, names in by_module.items()
        for depth, name in enumerate(reversed(names))
    }


def parameter_term(
    view: AdapterView, parameter: str, facts: ModelFacts, layer: LoraLayer, layout: ExpertLayout | None
) -> LoraTerm:
    """Return the delta of one parameter. `layout` is what the user says of lora_B; None to go by the config.

    Raises `UnsupportedAdapter` where the layout of lora_B cannot be known, `IncompatibleBase` where the shapes do not
    fit.
    """
    config = view.config
    a, b = layer.a, layer.b
    if a is None or b is None:
        raise AssertionError("the rules let no half of a pair pass")
    shape = facts.shapes[parameter]
    experts = shape[0] if len(shape) == _STACK else 1
    rank = config.rank(parameter)
    transposed = stack_is_transposed(parameter, facts)
    rows, columns = shape[-2:] if len(shape) >= _MATRIX else (0, 0)
    if transposed:
        rows, columns = columns, rows
    expected = ((rank * experts, columns), (rows, rank * experts))
    if len(shape) not in (_MATRIX, _STACK) or (a.shape, b.shape) != expected:
        raise IncompatibleBase(
            f"{a.path}: `{a.name}` {list(a.shape)} and its lora_B {list(b.shape)} do not fit `{parameter}` "
            f"{list(shape)} at rank {rank}: expected {list(expected[0])} and {list(expected[1])}",
            hint=OTHER_BASE,
        )
    return LoraTerm(
        a=a,
        b=b,
        scaling=config.scaling(parameter),
        experts=experts,
        layout=_layout(config, b, layout) if experts > 1 else ExpertLayout.RANK_MAJOR,
    )


def stack_is_transposed(parameter: str, facts: ModelFacts) -> bool:
    """Return whether a stack of experts is stored as [experts, in, out]."""
    return len(facts.shapes[parameter]) == _STACK and parameter.rpartition(".")[0] in facts.transposed


def _layout(config: AdapterConfig, b: StoredTensor, asked: ExpertLayout | None) -> ExpertLayout:
    named = config.expert_layout
    if named is not None and named not in {layout.value for layout in ExpertLayout}:
        raise UnsupportedAdapter(
            f"{config.path}: lora_B_layout: expected rank_major or grouped_by_expert, found {named}"
        )
    if asked is not None and named not in (None, asked.value):
        raise UnsupportedAdapter(
            f'{config.path}: lora_B_layout is {named}, but `expert_layout="{asked}"` was asked for'
        )
    if asked is None and named is None and config.by_unsloth:
        raise UnsupportedAdapter(
            f"{b.path}: `{b.name}` was written by Unsloth, which packed the experts' columns in another order until "
            "2026-09, and the file does not say which it is: the wrong one gives plausible garbage",
            hint='`expert_layout="grouped-by-expert"` for one trained before, `expert_layout="rank-major"` for one trained after',
        )
    return asked or (ExpertLayout(named) if named else ExpertLayout.RANK_MAJOR)
