"""The engine of several machines: every file of a plan is a task on a cluster, over storage that all nodes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.engines import Cluster
from lora_tool.core.errors import ExecutionError
from lora_tool.core.progress import Progress
from lora_tool.core.report import Finding
from lora_tool.core.tasks import Surroundings, TaskGroup, directory_for, versions_here
from lora_tool.execution.attempts import parts_of, require_divisible
from lora_tool.execution.backends.choosing import formula, formula_of, makes_factors
from lora_tool.execution.journal import Journal, versions_of
from lora_tool.execution.work import Finished, Work, WorkDone
from lora_tool.plans.core.manifest import sha256_of
from lora_tool.plans.core.ops import Precision


class OnCluster(Struct, frozen=True, kw_only=True):
    """The nodes of `cluster`: an `Engine` for `execute`."""

    cluster: Cluster

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """See `Engine`. Every node is asked for versions, inputs and output folder before anything is written.

        Raises `UnsupportedAdapter` for a plan that repeats PEFT's decomposition of base weights.
        """
        require_divisible(work.plan)
        parts, findings = tuple(parts_of(work)), dict[int, Sequence[Finding]]()

        def done(number: int, result: tuple[Mapping[str, Any], Sequence[Finding]]) -> None:
            retained, findings[number] = result
            for shard in parts[number].work.shards:
                finished(shard, retained)

        surroundings = surroundings_of(work)
        with self.cluster.connected() as connection:
            connection.require_nodes(surroundings)
            # inputs were looked for on every node, and a part stamps those that it reads
            tasks = TaskGroup(tasks=parts, surroundings=replace(surroundings, inputs=()), done=done)
            connection.map(tasks, progress=progress)
        return WorkDone(
            hashes={path: sha256_of(path) for path in work.plan.hashed},
            findings=[each for number in sorted(findings) for each in findings[number]],
        )


class PlanSurroundings(Surroundings, frozen=True, kw_only=True):
    """What every node must have to compute the bytes of a plan: the same formula, too, None where all is copied."""

    precision: Precision
    factors: bool
    """Whether factors of LoRA are computed."""
    formula: str | None

    def enter(self, node: str) -> None:
        """See `Surroundings`."""
        Surroundings.enter(self, node)
        here = formula(self.precision, factors=self.factors)
        if self.formula is not None and here != self.formula:
            raise ExecutionError(
                f"node {node} computes with {here}, and this machine with {self.formula}: they may differ by one ulp",
                hint="install lora-tool the same way on all nodes: `lora-tool env` says whether it has its kernel",
            )


def surroundings_of(work: Work) -> PlanSurroundings:
    """Return what every node must have to do parts of the work."""
    plan = work.plan
    paths = [work.folder, *(stamp.path for stamp in plan.inputs)]
    return PlanSurroundings(
        directory=directory_for(paths),
        inputs=tuple(stamp.for_another_machine() for stamp in plan.inputs),
        versions=versions_here(*versions_of(plan)),
        mark=Journal(work.folder, work.digest).mark,
        precision=plan.precision,
        factors=makes_factors(plan),
        formula=formula_of(plan),
    )
