"""Whether a merge leaves anything out: every tensor of the adapters is somewhere, every target has tensors."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.plan.ends import MATRIX
from lora_tool.plan.features import UNMERGED
from lora_tool.plan.model import (
    Assemble,
    BiasDelta,
    Cast,
    Copy,
    DoraDelta,
    Fate,
    Leftover,
    LoraDelta,
    Op,
    ReplaceRows,
    Step,
)
from lora_tool.plan.steps import Merge, destination, is_dropped, module_and_leaf, not_in_base
from lora_tool.tensors import StoredTensor


def require_all_consumed(merge: Merge, steps: tuple[Step, ...], leftovers: tuple[Leftover, ...]) -> None:
    """Raise unless every adapter tensor is in a step or dropped by name, and every target of a config has tensors."""
    used = {(tensor.path, tensor.name) for step in steps for tensor in _adapter_tensors(step.op)}
    dropped = {(item.path, item.name) for item in leftovers if item.fate is Fate.DROPPED}
    accounted = used | dropped
    for part in merge.adapted:
        for name, key in part.adapter.keys.items():
            tensor = part.adapter.tensors[name]
            if (tensor.path, name) not in accounted:
                raise _unplaced(merge, tensor, destination(key))
        forgotten = [module for module in _targeted(merge, part.config) if module not in part.modules.lora]
        if forgotten:
            raise UnsupportedAdapter(
                f"{part.adapter.root}: `target_modules` names {len(forgotten)} modules of the base that have no LoRA "
                f"tensors in the adapter, the first is `{forgotten[0]}`: the adapter is incomplete",
                hint=f"lora-tool validate {part.adapter.root} --base {merge.base.root}",
            )


def _unplaced(merge: Merge, tensor: StoredTensor, wanted: str) -> IncompatibleBase | UnsupportedAdapter:
    if wanted in merge.base.tensors and is_dropped(merge, wanted):
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` belongs to `{wanted}`, which a sequence classifier does not have",
            hint="merge it as a causal LM: --task causal-lm",
        )
    if (module := wanted.removesuffix(".bias")) in merge.modules.lora_bias and f"{module}.weight" in merge.base.tensors:
        return UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}`: `lora_bias` on a layer that has no bias: the merged model would have no "
            "place for it, and PEFT cannot merge it either",
            hint=UNMERGED,
        )
    if wanted in merge.arch.causal_only and wanted not in merge.base.tensors:
        return IncompatibleBase(
            f"{tensor.path}: `{tensor.name}` belongs to `{wanted}`, which is tied to the embeddings of this base: "
            "changing it would change both ends",
        )
    return not_in_base(merge, tensor, wanted)


def _adapter_tensors(op: Op) -> Iterator[StoredTensor]:
    match op:
        case Copy() | Cast():
            yield op.source
        case LoraDelta():
            yield op.source
            for term in op.terms:
                yield from (term.a, term.b)
        case ReplaceRows():
            yield from (op.source, op.rows)
        case DoraDelta():
            yield from (op.source, op.term.a, op.term.b, op.magnitude)
        case BiasDelta():
            yield op.source
            for bias in op.terms:
                yield bias.bias
        case Assemble():
            for part in op.parts:
                yield from _adapter_tensors(part)


def _targeted(merge: Merge, config: AdapterConfig) -> Iterator[str]:
    for tensor in merge.base.tensors.values():
        if tensor.name in merge.modules.parameters:
            continue
        module, leaf = module_and_leaf(tensor.name)
        matrix = leaf == "weight" and len(tensor.shape) == MATRIX
        if matrix and not is_dropped(merge, tensor.name) and config.targets(module):
            yield module
