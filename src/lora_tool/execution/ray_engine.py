"""The engine of several machines: every file of a plan is a task on a Ray cluster, over storage that all nodes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.cluster.ray_cluster import Connection, RayCluster
from lora_tool.cluster.task import Surroundings, TaskGroup, directory_for, versions_here
from lora_tool.errors import ExecutionError, LoraToolError
from lora_tool.execution.attempts import Part, parts_of, require_divisible
from lora_tool.execution.backends.choosing import formula, formula_of, makes_factors
from lora_tool.execution.journal import Journal, versions_of
from lora_tool.execution.work import Ended, Finished, Unfinished, Work, WorkDone
from lora_tool.plan.core.manifest import sha256_of
from lora_tool.plan.core.ops import Precision
from lora_tool.progress import Progress
from lora_tool.report import Finding


class RayEngine(Struct, frozen=True, kw_only=True):
    """The nodes of `cluster`, each task on one CPU: see `lora_tool.cluster.ray_cluster`."""

    cluster: RayCluster = field(default_factory=RayCluster)

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """See `Engine`. Every node is asked for versions, inputs and output folder before anything is written.

        Raises `UnsupportedAdapter` for a plan that repeats PEFT's decomposition of base weights.
        """
        [ended] = self.run_each([Unfinished(work=work, finished=finished, progress=progress)])
        if isinstance(ended, Exception):
            raise ended
        return ended

    def run_each(self, folders: Sequence[Unfinished]) -> list[Ended]:
        """Write the weight files of all folders, each a task, and return how each folder ended.

        An error of one folder stops no other; its own tasks are cancelled.
        """
        shared = [_Shared(each) for each in folders]
        for each in shared:
            with each.tried():
                require_divisible(each.folder.work.plan)
        if any(each.error is None for each in shared):
            with self.cluster.connected() as connection:
                _write(shared, connection, folders[0].progress)  # which is that of all
        return [each.ended() for each in shared]


def _write(shared: Sequence[_Shared], connection: Connection, progress: Progress) -> None:
    groups: list[tuple[_Shared, TaskGroup]] = []
    for each in shared:
        if each.error is None:
            with each.tried():
                groups.append((each, each.tasks(connection)))
    errors = connection.map_each([group for _, group in groups], progress=progress)
    for (each, _), error in zip(groups, errors, strict=True):
        each.error = error


class _Shared(Struct):
    """A folder whose files the nodes write: its parts, what they found, and the error that it ended with."""

    folder: Unfinished
    parts: Sequence[Part] = ()
    findings: dict[int, Sequence[Finding]] = field(default_factory=dict)
    error: LoraToolError | OSError | None = None

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Do a part of its work inside: an error ends this folder alone."""
        try:
            yield
        except (LoraToolError, OSError) as error:
            self.error = error

    def tasks(self, connection: Connection) -> TaskGroup:
        """Return its parts, once every node is known to have what they need. Raises as `Connection.require_nodes`."""
        surroundings = surroundings_of(self.folder.work)
        connection.require_nodes(surroundings)
        self.parts = tuple(parts_of(self.folder.work))
        # inputs were looked for on every node, and a part stamps those that it reads
        return TaskGroup(tasks=self.parts, surroundings=replace(surroundings, inputs=()), done=self._done)

    def _done(self, number: int, result: tuple[Mapping[str, Any], Sequence[Finding]]) -> None:
        retained, self.findings[number] = result
        for shard in self.parts[number].work.shards:
            self.folder.finished(shard, retained)

    def ended(self) -> Ended:
        """Return how it ended, once all tasks have."""
        hashes: dict[Path, str] = {}
        with self.tried():
            if self.error is None:
                hashes = {path: sha256_of(path) for path in self.folder.work.plan.hashed}
        findings = [each for number in sorted(self.findings) for each in self.findings[number]]
        return self.error or WorkDone(hashes=hashes, findings=findings)


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
