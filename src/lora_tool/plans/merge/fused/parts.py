"""Changes of parameters in memory that are several tensors on disk, or parts of one."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from lora_tool.adapters.support import ALLOW_IN_MEMORY
from lora_tool.checkpoints import AdapterDir
from lora_tool.core import keys
from lora_tool.core.errors import OnlyInMemory, UnsupportedAdapter
from lora_tool.core.tensors import StoredTensor, TensorAction
from lora_tool.models.mapping.model import ModelFacts, NamesOnDisk, RowMapping, RowSlice, row_count
from lora_tool.plans.adapter.combine import AdapterModules
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import Cast, Copy, Dequantise, LoraDelta, Precision
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.draft import Model, ParameterConversion
from lora_tool.plans.merge.fused.split_steps import disk_steps
from lora_tool.plans.merge.model.converted import disk_name, homes

PerExpert = Mapping[str, tuple[LoraTerm, ...]]
"""Tensor on disk → its own deltas, as a part of a fused parameter."""
_SAVE_AGAIN = "write it as transformers does, once: from_pretrained(BASE), save_pretrained(NEW), then --base NEW"
_UNTIED_WAY = '`precision="float32"` with `untie=True` writes each end of tied embeddings as it was trained'
_OWN_WAY = '`precision="float32"` merges every tensor as it was trained'


def parts_of_fused(
    model: Model, conversion: ParameterConversion, modules: AdapterModules, precision: Precision
) -> tuple[AdapterModules, PerExpert]:
    """Return the modules without those that are not layers, and the deltas on tensors that are only on disk.

    PEFT takes an adapter that an earlier transformers trained on single experts, and fuses its factors; here each
    goes into the expert's own tensor. Raises `UnsupportedAdapter` where PEFT's bits are wanted and PEFT would
    leave tensors out or scale them otherwise.
    """
    mapping, facts = conversion.mapping, conversion.mapping.facts
    if precision is Precision.PEFT and not conversion.same_names:
        for adapter in model.adapters:
            _require_pefts_reading(mapping, adapter)
    _require_as_in_memory(mapping, conversion.copied_only, modules)
    lora = dict(modules.lora)
    parameters = dict(modules.parameters)
    per_expert: dict[str, tuple[LoraTerm, ...]] = {}
    for module in [module for module in lora if module not in facts.layers]:
        if module in facts.modules:
            parameters[f"{module}.weight"] = lora.pop(module)
        elif (name := disk_name(mapping, module)) is not None:
            per_expert[name] = lora.pop(module)
    if precision is Precision.PEFT:
        _require_pefts_experts(mapping, model.adapters, per_expert)
    changed = (*parameters, *(f"{name}.weight" for name in lora), *map(mapping.place, per_expert))
    _require_unchanged(model.base.root, conversion.partly_quantised.intersection(changed))
    _require_no_lora_on_tied(facts, (*lora, *(name.removesuffix(".weight") for name in parameters)))
    return replace(modules, lora=lora, parameters=parameters), per_expert


def steps_on_disk(
    model: Model,
    conversion: ParameterConversion,
    steps: Sequence[Step],
    per_expert: PerExpert,
    others: Sequence[Step] = (),
) -> tuple[Step, ...]:
    """Return the steps on the tensors that `save_pretrained` writes, those of the base in the base's order.

    What lies transposed on disk is written so. `per_expert` are deltas on tensors that are only on disk: parts of fused
    parameters. `others` are steps on tensors that are no parameters.
    """
    by_name = {step.out.name: step for step in steps}
    stored = conversion.copied_only.keys()
    shapes = {name: step.out.shape for name, step in by_name.items()} | {
        name: conversion.mapping.facts.shapes[name] for name in stored
    }
    turned = {name: shapes.pop(name) for name in by_name.keys() & conversion.turned}
    written = conversion.mapping.written(shapes)
    for name, shape in turned.items():
        (on_disk,) = conversion.mapping.parameters[name].sources
        rows = RowSlice(name=name, start=0, rows=row_count(shape))
        written[on_disk] = RowMapping(shape=shape, pieces=(rows,), sources=(name,))
    transposed = {name: made for name, made in written.items() if stored and not stored.isdisjoint(made.sources)}
    made_of_rows = {name: made for name, made in written.items() if name not in transposed}
    out = {step.out.name: step for step in disk_steps(by_name, made_of_rows, conversion.disk)}
    out |= {step.out.name: step for step in _stored(model, conversion, transposed)}
    out |= {name: _with_delta(out[name], term) for name, term in per_expert.items()}
    out |= {step.out.name: step for step in others}
    in_order = [out.pop(name) for name in conversion.disk if name in out]
    return (*in_order, *out.values())


def _stored(model: Model, conversion: ParameterConversion, written: Mapping[str, RowMapping]) -> Iterator[Step]:
    """Yield copies of the tensors behind parameters that are not rows of them: saving transposes them back."""
    for name, made in written.items():
        tensor = conversion.disk.get(name)
        if tensor is None or tensor.shape != made.shape:
            raise UnsupportedAdapter(
                f"{model.base.root}: `{name}` {list(made.shape)} is stored transposed"
                + (f", {list(tensor.shape)}" if tensor else "")
                + ", and transformers would not write it that way",
                hint=_SAVE_AGAIN,
            )
        yield Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="as in the base")


def _with_delta(step: Step, terms: tuple[LoraTerm, ...]) -> Step:
    if not isinstance(step.op, Copy | Cast | Dequantise):
        raise UnsupportedAdapter(f"`{step.out.name}` has LoRA both on its own and as a part of a fused parameter")
    # PEFT fuses these factors, and rounds the delta of a bare parameter to its type
    op = LoraDelta(source=step.op.source, terms=terms, rounded=True)
    return Step(out=step.out, op=op, action=TensorAction.MERGED, reason=str(op))


def _require_pefts_experts(mapping: NamesOnDisk, adapters: Sequence[AdapterDir], per_expert: PerExpert) -> None:
    """Raise `UnsupportedAdapter` where PEFT cannot fuse the factors of all experts, or would scale them differently."""
    for parameter in {mapping.place(name) for name in per_expert}:
        pieces = mapping.piece_names(parameter)
        if not pieces <= per_expert.keys():
            raise UnsupportedAdapter(
                f"{adapters[0].root}: {len(pieces - per_expert.keys())} of the {len(pieces)} tensors that make "
                f"`{parameter}` have no LoRA, but PEFT fuses the factors of all",
                hint=_OWN_WAY,
            )
    for config in (adapter.config for adapter in adapters if per_expert and adapter.config):
        if config.use_rslora or config.rank_pattern or config.alpha_pattern:
            raise UnsupportedAdapter(
                f"{config.path}: use_rslora, rank_pattern or alpha_pattern on single experts: PEFT fuses their factors, "
                "and would scale them differently than in training",
                hint=_OWN_WAY,
            )


def _require_pefts_reading(mapping: NamesOnDisk, adapter: AdapterDir) -> None:
    """Raise `UnsupportedAdapter` where PEFT would leave some of the adapter's tensors out."""
    tensors = {keys.parse(name).canonical: tensor.shape for name, tensor in adapter.tensors.items()}
    lost = mapping.left_out_by_peft(adapter.root, tensors)
    if lost:
        # by the names of the file: PEFT may have renamed them into nothing
        found = homes(adapter, mapping)
        placed = None not in found.values()
        weights = {f"{path}.weight" for path in found.values() if path}
        tied = {name for pair in mapping.facts.tied.items() for name in pair} & weights
        raise UnsupportedAdapter(
            f"{adapter.root}: with the installed transformers, PEFT has no place for {len(lost)} of its tensors and would leave "
            f"them out with a warning; the first is `{lost[0]}`",
            hint=_UNTIED_WAY
            if tied
            else _OWN_WAY
            if placed
            else f"lora-tool validate {shlex.quote(str(adapter.root))}",
        )


def _require_as_in_memory(
    mapping: NamesOnDisk, copied_only: Mapping[str, StoredTensor], modules: AdapterModules
) -> None:
    """Raise `UnsupportedAdapter` for LoRA on a weight that is stored transposed.

    Raises `OnlyInMemory` where transformers writes the weight back transposed, so that saving it again does not help.
    """
    adapted = {*modules.parameters, *(f"{module}.weight" for module in modules.lora), *modules.saved}
    for name in sorted(adapted & copied_only.keys()):
        tensor = copied_only[name]
        message = (
            f"{tensor.path}: `{tensor.name}` is stored transposed, {list(tensor.shape)}, but the adapter is for "
            f"`{name}`, {list(mapping.facts.shapes[name])}"
        )
        if not mapping.is_written_as_in_memory(name):
            raise OnlyInMemory(f"{message}, and transformers writes it back transposed", hint=ALLOW_IN_MEMORY)
        raise UnsupportedAdapter(message, hint=_SAVE_AGAIN)


def _require_no_lora_on_tied(facts: ModelFacts, modules: Iterable[str]) -> None:
    """Raise `UnsupportedAdapter` for LoRA on a layer that is the same as another.

    The ends of tied embeddings have checks of their own.
    """
    output = f"{facts.output}.weight"
    shared = {name for pair in facts.tied.items() if pair[0] != output for name in pair}
    for module in modules:
        if f"{module}.weight" in shared:
            raise UnsupportedAdapter(
                f"`{module}` is one layer in several places of {facts.class_name}: PEFT's merge would add the LoRA of "
                "each place to all of them, although each was trained for one place",
                hint="serve the adapter unmerged",
            )


def _require_unchanged(root: Path, changed: Collection[str]) -> None:
    """Raise `UnsupportedAdapter` for LoRA on parameters of the base in `root` that are partly quantised: W + ΔW would be rounded twice."""
    if changed:
        raise UnsupportedAdapter(
            f"{root}: the adapter changes `{min(changed)}`, which transformers makes of tensors of which some are quantised "
            "and some are not",
            hint="merge into the 16-bit model that it was made from: `base=MODEL`",
        )
