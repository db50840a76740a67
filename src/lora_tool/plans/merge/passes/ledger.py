"""Where every tensor of base and adapter goes: into a step, or dropped with a reason."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from lora_tool.adapters.support import BIAS_WITHOUT_PLACE, UNMERGED
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.keys import AdapterKey, Part, without_wrapped
from lora_tool.core.options import Options
from lora_tool.core.tensors import StoredTensor, TensorAction
from lora_tool.plans.core.steps import InputRecord, Step
from lora_tool.plans.merge.draft import Draft
from lora_tool.plans.merge.passes.steps import not_in_base

_WHOLE = frozenset({Part.PLAIN, Part.SAVED_MODULE})
"""Parts of an adapter that are a tensor of the model as they stand."""


def adapter_leftovers(draft: Draft) -> Iterator[InputRecord]:
    """Yield every tensor of the adapters with the output tensor that it is in, or why it is in none."""
    for part in draft.adapted:
        tensors, dropped = part.adapter.tensors, part.modules.dropped
        for name, key in part.adapter.keys.items():
            path = tensors[name].path
            if name in dropped:
                yield InputRecord(path=path, name=name, action=TensorAction.DROPPED, reason=dropped[name])
            else:
                how = "is" if key.part in _WHOLE else "in"
                yield InputRecord(
                    path=path, name=name, action=TensorAction.CONSUMED, reason=f"{how} {_destination(key)}"
                )


def _destination(key: AdapterKey) -> str:
    """Return the model's tensor that an adapter's tensor is, or goes into."""
    if key.part in _WHOLE or key.part in (Part.BASE_LAYER, Part.TOKENS_BASE):
        return without_wrapped(key.tensor)
    return f"{without_wrapped(key.module)}.{'bias' if key.leaf == 'bias' else 'weight'}"


def require_all_consumed(draft: Draft, steps: tuple[Step, ...], leftovers: tuple[InputRecord, ...]) -> None:
    """Raise unless every adapter tensor is in a step or dropped by name."""
    whole = {id(tensor) for step in steps for tensor in step.op.inputs}
    left = [
        (name, part)
        for part in draft.adapted
        for name, tensor in part.adapter.tensors.items()
        if id(tensor) not in whole
    ]
    if not left:  # as for nearly all adapters: of some only rows are in a step
        return
    used = {(tensor.path, tensor.name) for step in steps for tensor in step.op.inputs}
    accounted = used | {(item.path, item.name) for item in leftovers if item.action is TensorAction.DROPPED}
    for name, part in left:
        tensor = part.adapter.tensors[name]
        if (tensor.path, name) not in accounted:
            raise _unplaced(draft, tensor, _destination(part.adapter.keys[name]))


def _unplaced(draft: Draft, tensor: StoredTensor, wanted: str) -> IncompatibleBase | UnsupportedAdapter:
    if (module := wanted.removesuffix(".bias")) in draft.modules.lora_bias and f"{module}.weight" in draft.base.tensors:
        return UnsupportedAdapter(f"{tensor.path}: `{tensor.name}`: {BIAS_WITHOUT_PLACE}", hint=UNMERGED)
    if wanted in draft.model.arch.causal_only and wanted not in draft.base.tensors:
        return IncompatibleBase(
            f"{tensor.path}: `{tensor.name}` belongs to `{wanted}`, which is tied to the embeddings of this base: "
            "a change of it would change both ends",
            hint=UNMERGED,
        )
    return not_in_base(draft, tensor, wanted)


def accounted_for(draft: Draft, _: Options) -> Draft:
    """Return the draft with what became of every tensor of the adapters. Raises where one is in no step, and why unknown."""
    draft = replace(draft, leftovers=(*draft.leftovers, *adapter_leftovers(draft)))
    require_all_consumed(draft, draft.steps, draft.leftovers)
    return draft
