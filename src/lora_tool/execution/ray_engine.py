"""The engine of several machines: every file of a plan is a task on a Ray cluster, over storage that all nodes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_tool.cluster.ray_cluster import RayCluster
from lora_tool.cluster.task import Surroundings, installed_version
from lora_tool.errors import ExecutionError, LoraToolError
from lora_tool.execution.attempts import Part, parts_of, require_divisible
from lora_tool.execution.backends.choosing import formula, formula_of
from lora_tool.execution.journal import Journal, versions_of
from lora_tool.execution.work import Ended, Finished, Unfinished, Work, WorkDone
from lora_tool.plan.core.manifest import sha256_of
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.progress import Progress
from lora_tool.report import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngine:
    """The nodes of `cluster`, each task on one CPU: see `lora_tool.cluster.ray_cluster`."""

    cluster: RayCluster = field(default_factory=RayCluster)

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """See `Engine`. Every node is asked for versions, inputs and output folder before anything is written.

        Raises `UnsupportedAdapter` for a plan that repeats PEFT's decomposition of base weights.
        """
        plan = work.plan
        require_divisible(plan)
        parts = tuple(parts_of(work))
        findings: dict[int, Sequence[Finding]] = {}

        def done(number: int, result: tuple[Mapping[str, Any], Sequence[Finding]]) -> None:
            retained, findings[number] = result
            for shard in parts[number].work.shards:
                finished(shard, retained)

        with self.cluster.connected() as connection:
            surroundings = surroundings_of(work)
            connection.require_nodes(surroundings)
            connection.map(parts, replace(surroundings, inputs=()), progress=progress, done=done)
        return _done(plan, findings)

    def run_each(self, folders: Sequence[Unfinished]) -> list[Ended]:
        """Write the weight files of all folders, each a task, and return how each folder ended.

        An error of one folder stops no other.
        """
        errors: dict[int, LoraToolError] = {}
        parts: list[tuple[int, Part]] = []
        findings: list[dict[int, Sequence[Finding]]] = [{} for _ in folders]

        def done(number: int, result: tuple[Mapping[str, Any], Sequence[Finding]]) -> None:
            whose, part = parts[number]
            retained, findings[whose][number] = result
            for shard in part.work.shards:
                folders[whose].finished(shard, retained)

        def failed(number: int, error: LoraToolError) -> None:
            errors.setdefault(parts[number][0], error)

        with self.cluster.connected() as connection:
            surroundings = [surroundings_of(each.work) for each in folders]
            for number, each in enumerate(folders):
                try:
                    require_divisible(each.work.plan)
                    connection.require_nodes(surroundings[number])
                    parts += [(number, part) for part in parts_of(each.work)]
                except LoraToolError as error:
                    errors[number] = error
            # where each task enters: inputs and folder were looked for on every node, and a part stamps what it reads
            entered = next((each for each in surroundings if each.formula), surroundings[0])
            directory = next((each.directory for each in surroundings if each.directory), None)
            connection.map(
                [part for _, part in parts],
                replace(entered, inputs=(), mark=None, directory=directory),
                progress=folders[0].progress,  # that of all
                done=done,
                failed=failed,
            )
        return [
            errors[number] if number in errors else _done(each.work.plan, findings[number])
            for number, each in enumerate(folders)
        ]


def _done(plan: Plan, findings: Mapping[int, Sequence[Finding]]) -> WorkDone:
    hashes = {path: sha256_of(path) for path in plan.hashed}
    return WorkDone(hashes=hashes, findings=[each for number in sorted(findings) for each in findings[number]])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSurroundings(Surroundings):
    """What every node must have to compute the bytes of a plan: the same formula, too, None where all is copied."""

    precision: Precision
    formula: str | None

    def enter(self, node: str) -> None:
        """See `Surroundings`."""
        Surroundings.enter(self, node)
        if self.formula is not None and formula(self.precision) != self.formula:
            raise ExecutionError(
                f"node {node} computes with {formula(self.precision)}, and this machine with {self.formula}: they may "
                "differ by one ulp",
                hint="install lora-tool the same way on all nodes: `lora-tool env` says whether it has its kernel",
            )


def surroundings_of(work: Work) -> PlanSurroundings:
    """Return what every node must have to do parts of the work."""
    plan = work.plan
    paths = [work.folder, *(stamp.path for stamp in plan.inputs)]
    packages = ("lora-tool", "python", *versions_of(plan))
    return PlanSurroundings(
        directory=None if all(path.is_absolute() for path in paths) else Path.cwd(),
        inputs=tuple(stamp.for_another_machine() for stamp in plan.inputs),
        versions={package: installed_version(package) or "" for package in packages},
        mark=Journal(work.folder, work.digest).mark,
        precision=plan.precision,
        formula=formula_of(plan),
    )
