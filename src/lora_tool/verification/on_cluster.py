"""Comparing a merged model on a cluster: the tensors of each of its files are a task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.engines import Cluster
from lora_tool.core.progress import Progress
from lora_tool.core.tasks import Surroundings, TaskGroup, directory_for, versions_here
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.weights import Weights
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.verification.checking import check_steps
from lora_tool.verification.levels import Level


class FileComparison(Struct, frozen=True, kw_only=True):
    """The comparison of one file's tensors with the steps that should have made them: a `Task`."""

    path: Path
    steps: tuple[Step, ...]
    tensors: Mapping[str, StoredTensor]
    level: Level
    precision: Precision | None

    @property
    def name(self) -> str:
        """The file."""
        return str(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def run(self, progress: Progress) -> dict[str, TensorEvidence]:
        """Return the evidence of every tensor."""
        return check_steps(
            self.steps, self.tensors, level=self.level, precision=self.precision, jobs=1, progress=progress
        )


def check_on_cluster(
    plan: Plan,
    merged: Weights,
    cluster: Cluster,
    *,
    level: Level,
    precision: Precision | None,
    progress: Progress,
) -> dict[str, TensorEvidence]:
    """Return what `check_steps` returns, in the order of the plan. Raises as it and as the `cluster`."""
    tasks = tuple(_comparisons(plan, merged, level, precision))
    evidence: dict[str, TensorEvidence] = {}
    stamps = {stamp.path: stamp for stamp in (*plan.inputs, *merged.stamps)}
    surroundings = Surroundings(
        directory=directory_for(stamps),
        inputs=tuple(stamp.for_another_machine() for stamp in stamps.values()),
        versions=versions_here("numpy"),
    )
    comparing = TaskGroup(
        tasks=tasks, surroundings=replace(surroundings, inputs=()), done=lambda _, found: evidence.update(found)
    )
    with cluster.connected() as connection:
        connection.require_nodes(surroundings)
        connection.map(comparing, progress=progress)
    return {step.out.name: evidence[step.out.name] for step in plan.steps if step.out.name in evidence}


def _comparisons(plan: Plan, merged: Weights, level: Level, precision: Precision | None) -> Iterator[FileComparison]:
    """Yield a task for each file that holds tensors of the plan."""
    by_file: dict[Path, list[Step]] = defaultdict(list)
    for step in plan.steps:
        stored = merged.tensors.get(step.out.name)
        if stored is not None:
            by_file[stored.path].append(step)
    for path, steps in by_file.items():
        tensors = {step.out.name: merged.tensors[step.out.name] for step in steps}
        yield FileComparison(path=path, steps=tuple(steps), tensors=tensors, level=level, precision=precision)
