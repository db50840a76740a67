"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tool.actions import TensorAction
from lora_tool.display import counted, printable, size
from lora_tool.plan.core.ops import Assemble, BiasDelta, Cast, Copy, DoraDelta, LoraDelta, LoraTerm, Op, ReplaceRows
from lora_tool.plan.core.steps import InputRecord, Shard, SideFile, Step
from lora_tool.tensors import StoredTensor

_SHOWN = 12


def plan_lines(
    notes: Iterable[str],
    counts: Mapping[str, int],
    shards: Sequence[Shard],
    side_files: Iterable[SideFile],
    leftovers: Iterable[InputRecord],
) -> Iterator[str]:
    """Yield a plan's lines: notes, what happens to how many tensors, files, and one step of each sort."""
    yield from map(printable, notes)
    yield "tensors: " + ", ".join(f"{count} {action}" for action, count in counts.items())
    nbytes = sum(shard.data_bytes for shard in shards)
    yield f"output: {size(nbytes)} in {counted(len(shards), 'weight file')}"
    for shard in shards[:_SHOWN]:
        yield f"  {shard.filename}  {counted(len(shard.steps), 'tensor')}, {size(shard.data_bytes)}"
    if len(shards) > _SHOWN:
        yield f"  … and {len(shards) - _SHOWN} more"
    for file in side_files:
        yield f"  {printable(file.filename)}  {printable(file.reason)}"
    yield "steps (one of each sort):"
    examples: dict[tuple[str, str], tuple[Step, int]] = {}
    for step in (step for shard in shards for step in shard.steps):
        key = (step.action.value, step.reason.partition(" from ")[0])
        examples[key] = (examples[key][0] if key in examples else step, examples.get(key, (step, 0))[1] + 1)
    for step, count in list(examples.values())[: 2 * _SHOWN]:
        yield f"  {step.action.value:<9} {printable(step.out.name)}  {printable(step.reason)}  (×{count})"
    dropped = [item for item in leftovers if item.action is TensorAction.DROPPED]
    for item in dropped[:_SHOWN]:
        yield f"  {'dropped':<9} {printable(item.name)}  {printable(item.reason)}"


def shard_json(shard: Shard, input_names: Mapping[Path, str]) -> dict[str, Any]:
    """Return an output file with its steps as JSON data. See `Plan.input_names`."""
    return {
        "filename": shard.filename,
        "bytes": len(shard.header) + shard.data_bytes,
        "steps": [step_json(step, input_names) for step in shard.steps],
    }


def step_json(step: Step, input_names: Mapping[Path, str]) -> dict[str, Any]:
    """Return one step as JSON data; also the ledger's entry of the manifest. See `Plan.input_names`."""
    return {
        "name": step.out.name,
        "dtype": step.out.dtype.value,
        "shape": list(step.out.shape),
        "fate": step.action.value,
        "reason": step.reason,
        **_op_json(step.op, input_names),
    }


def _op_json(op: Op, input_names: Mapping[Path, str]) -> Mapping[str, Any]:
    common = {
        "op": type(op).__name__,
        "source": op.source.name,
        "file": op.source.path.name,
        **_input_of(op.source, input_names),
    }
    match op:
        case Copy() | Cast():
            return common
        case LoraDelta():
            terms = [_term_json(term, input_names) for term in op.terms]
            init = {"init": op.init} if op.init else {}
            return {**common, "transposed": op.transposed, "terms": terms, **init}
        case DoraDelta():
            terms = [_term_json(op.term, input_names)]
            return {**common, "transposed": op.transposed, "terms": terms, "magnitude": op.magnitude.name}
        case ReplaceRows():
            rows = {"rows": op.rows.name, **_input_of(op.rows, input_names)}
            return {**common, **rows, "indices": list(op.indices)}
        case BiasDelta():
            biases = [
                {"bias": term.bias.name, "scaling": term.scaling, **_input_of(term.bias, input_names)}
                for term in op.terms
            ]
            return {**common, "terms": biases}
        case Assemble():
            parts = [{"rows": part.source.shape[0], **_op_json(part, input_names)} for part in op.parts]
            return {**common, "parts": parts}


def _term_json(term: LoraTerm, input_names: Mapping[Path, str]) -> dict[str, Any]:
    found = {"a": term.a.name, "b": term.b.name, "rank": term.rank, "scaling": term.scaling}
    if term.experts > 1:
        found |= {"experts": term.experts, "expert": term.expert, "layout": term.layout.value}
    if term.first:
        found["first"] = term.first
    return {**found, **_input_of(term.a, input_names)}


def _input_of(tensor: StoredTensor, input_names: Mapping[Path, str]) -> dict[str, str]:
    name = input_names.get(tensor.path.parent) if input_names else None
    return {"input": name} if name else {}
