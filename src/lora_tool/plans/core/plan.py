"""A plan: for every output tensor its source, the operation and the reason. Pure data, printable, comparable."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.core.display import counted, printable, size
from lora_tool.core.records import Shown
from lora_tool.core.report.findings import Finding
from lora_tool.core.report.json import finding_json
from lora_tool.core.tensors import FileStamp, TensorAction
from lora_tool.plans.core.operation import InputNames
from lora_tool.plans.core.ops import Cast, Precision
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step
from lora_tool.rules.merged.evidence import Expected
from lora_tool.rules.training.value_check import ValueCheck

_SHOWN = 12


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


class Plan(Shown, Struct, frozen=True, kw_only=True):
    """Everything that will be written, and where each input tensor goes. `notes` are the lines of the summary."""

    shards: tuple[Shard, ...]
    side_files: tuple[SideFile, ...]
    leftovers: tuple[InputRecord, ...]
    inputs: tuple[FileStamp, ...]
    precision: Precision
    manifest: Mapping[str, Any]
    input_names: Mapping[Path, str] = field(default_factory=dict)
    """Folder → its name in the manifest's `inputs`, where several adapters have tensors of the same name."""
    hashed: tuple[Path, ...] = ()
    """Inputs whose sha256 the manifest records; taken while writing, because it costs a second per 400 MB."""
    findings: tuple[Finding, ...] = ()
    """The findings of the rules about the inputs; none refused the plan."""
    values: ValueCheck | None = None
    """The check of the inputs' values, which runs while they are copied."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        """All steps, shard by shard."""
        return chain.from_iterable(map(attrgetter("steps"), self.shards))

    @property
    def folders(self) -> frozenset[Path]:
        """The folders that are read."""
        return frozenset(stamp.path.parent for stamp in self.inputs)

    @property
    def expected(self) -> Expected:
        """The output of the plan, in the form that the rules for merged models read."""
        return Expected(tensors={step.out.name: step.out for step in self.steps}, files=self.side_files)

    @property
    def data_bytes(self) -> int:
        """Bytes of all output tensors: the index's `total_size`."""
        return sum(map(attrgetter("data_bytes"), self.shards))

    @property
    def only_copies(self) -> bool:
        """Whether every output tensor is the bytes of an input, as they lie there or, in a matrix, transposed."""
        return all(
            step.op.is_copy or (isinstance(step.op, Cast) and step.op.source.dtype is step.out.dtype)
            for step in self.steps
        )

    @property
    def recomputes_inits(self) -> bool:
        """Whether a base weight must be changed as PEFT changes it when it builds its layers."""
        return any(step.op.taken_out for step in self.steps)

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of the result that are known before it is written, as JSON data: how much of ΔW a computed adapter
        and its modules keep, and requantised weights.
        """
        return {name: self.manifest[name] for name in ("kept", "modules", "requantised") if name in self.manifest}

    def counts(self) -> dict[str, int]:
        """Return how many tensors each action has: of the output first, then of the inputs."""
        counts = Counter[str]()
        for step in self.steps:
            counts[step.action.value] += 1
        for item in self.leftovers:
            counts[item.action.value] += 1
        return dict(counts)

    def tally(self) -> str:
        """Return in words how many output tensors each action has, and how many tensors of adapters are used."""
        counts = self.counts()
        base = os.path.realpath(self.manifest.get("inputs", {}).get("base", {}).get("path") or os.devnull)
        consumed = Counter(item.path for item in self.leftovers if item.action is TensorAction.CONSUMED)
        used = sum(count for path, count in consumed.items() if os.path.realpath(path.parent) != base)
        actions = ", ".join(f"{count:,} {what}" for what, count in counts.items() if what != TensorAction.CONSUMED)
        return f"{actions}; all {used:,} tensors of the adapter used" if used else actions

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield notes, the number of tensors for each action, files, and one step of each sort."""
        yield from map(printable, self.notes)
        yield f"tensors: {self.tally()}"
        yield f"output: {size(self.data_bytes)} in {counted(len(self.shards), 'weight file')}"
        for shard in self.shards[:_SHOWN]:
            yield f"  {shard.filename}  {counted(len(shard.steps), 'tensor')}, {size(shard.data_bytes)}"
        if len(self.shards) > _SHOWN:
            yield f"  … and {len(self.shards) - _SHOWN} more"
        for file in self.side_files:
            yield f"  {printable(file.filename)}  {printable(file.reason)}"
        yield "steps (one of each sort):"
        sorts: dict[tuple[str, str], list[Step]] = {}
        for step in self.steps:
            sorts.setdefault((step.action.value, step.reason.partition(" from ")[0]), []).append(step)
        width = max(9, *map(len, self.counts()))
        for step, *others in list(sorts.values())[: 2 * _SHOWN]:
            name, reason = printable(step.out.name), printable(step.reason)
            yield f"  {step.action.value:<{width}} {name}  {reason}  (×{1 + len(others)})"
        dropped = [item for item in self.leftovers if item.action is TensorAction.DROPPED]
        for item in dropped[:_SHOWN]:
            yield f"  {'dropped':<{width}} {printable(item.name)}  {printable(item.reason)}"

    def __repr__(self) -> str:
        return f"Plan({self.tally()}: {size(self.data_bytes)} in {counted(len(self.shards), 'weight file')})"

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON data: every step, side file and leftover with its reason."""
        return {
            "schema_version": 1,
            "precision": self.precision.value,
            "total_size": self.data_bytes,
            "notes": list(self.notes),
            "findings": [finding_json(finding) for finding in self.findings],
            "warnings": list(self.warnings),
            "counts": self.counts(),
            **self.figures,
            "shards": [
                {
                    "filename": shard.filename,
                    "bytes": shard.nbytes,
                    "steps": [step_json(step, self.input_names) for step in shard.steps],
                }
                for shard in self.shards
            ],
            "side_files": [
                {"filename": file.filename, "source": str(file.source) if file.source else None, "reason": file.reason}
                for file in self.side_files
            ],
            "leftovers": [leftover_json(item) for item in self.leftovers],
        }
