"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lora_tool.core.actions import TensorAction
from lora_tool.core.display import counted, printable, size
from lora_tool.plans.core.operation import InputNames
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step

_SHOWN = 12


def plan_lines(
    notes: Iterable[str],
    counts: Mapping[str, int],
    shards: Sequence[Shard],
    side_files: Iterable[SideFile],
    leftovers: Iterable[InputRecord],
) -> Iterator[str]:
    """Yield a plan's lines: notes, the number of tensors for each action, files, and one step of each sort."""
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
    width = max(9, *(len(action) for action in counts), 0)
    for step, count in list(examples.values())[: 2 * _SHOWN]:
        yield f"  {step.action.value:<{width}} {printable(step.out.name)}  {printable(step.reason)}  (×{count})"
    dropped = [item for item in leftovers if item.action is TensorAction.DROPPED]
    for item in dropped[:_SHOWN]:
        yield f"  {'dropped':<{width}} {printable(item.name)}  {printable(item.reason)}"


def shard_json(shard: Shard, input_names: InputNames) -> dict[str, Any]:
    """Return an output file with its steps as JSON data. See `Plan.input_names`."""
    return {
        "filename": shard.filename,
        "bytes": len(shard.header) + shard.data_bytes,
        "steps": [step_json(step, input_names) for step in shard.steps],
    }


def step_json(step: Step, input_names: InputNames) -> dict[str, Any]:
    """Return one step as JSON data; also the ledger's entry of the manifest. See `Plan.input_names`."""
    return {
        "name": step.out.name,
        "dtype": step.out.dtype.value,
        "shape": list(step.out.shape),
        "fate": step.action.value,
        "reason": step.reason,
        **step.op.describe(input_names),
    }


def leftover_json(item: InputRecord) -> dict[str, Any]:
    """Return where an input tensor went that is in no step, as JSON data."""
    return {"path": str(item.path), "name": item.name, "fate": item.action.value, "reason": item.reason}
