"""The engine of several machines: every file of a plan is a task on a Ray cluster, over storage that all nodes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_tool.cluster.ray_cluster import RayCluster
from lora_tool.cluster.task import Surroundings, installed_version
from lora_tool.errors import ExecutionError
from lora_tool.execution.attempts import parts_of, require_divisible
from lora_tool.execution.backends.choosing import formula, formula_of
from lora_tool.execution.journal import Journal, versions_of
from lora_tool.execution.work import Finished, Work, WorkDone
from lora_tool.plan.core.manifest import sha256_of
from lora_tool.plan.core.ops import Precision
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
