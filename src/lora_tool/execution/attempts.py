"""Writing files of a folder that others write to as well: each file is made aside, and renamed when it is on the disk.

Finished files are recorded in the folder's journal. A file may be written twice, or by two machines at the same time:
both make the same bytes, and the later rename replaces the earlier file.
"""

from __future__ import annotations

import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.display import counted, size
from lora_tool.core.engines import Cluster
from lora_tool.core.errors import ExecutionError, OutputExists, UnsupportedAdapter
from lora_tool.core.options import named_in_errors
from lora_tool.core.progress import Progress
from lora_tool.core.records import Shown
from lora_tool.core.report import Finding
from lora_tool.core.report.model import refuse_errors
from lora_tool.core.share import Share
from lora_tool.core.tasks import Surroundings, TaskGroup, directory_for, versions_here
from lora_tool.execution.at_work import at_work
from lora_tool.execution.backends.choosing import formula, formula_of, makes_factors
from lora_tool.execution.folder import (
    check_output,
    check_space,
    errors_of_the_system,
    real_place,
    shared_folder,
    sync_folder,
)
from lora_tool.execution.journal import Journal, digest_of, recorded_looks, versions_of
from lora_tool.execution.local_engine import LocalEngine, OnWritten
from lora_tool.execution.reading import Sources
from lora_tool.execution.work import Finished, Work, WorkDone
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.manifest import sha256_of
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard


class AttemptEngine(Struct, frozen=True, kw_only=True):
    """The engine of one machine among several that write to the same folder. `jobs` are its threads."""

    jobs: int | None = None

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """See `Engine`. A file that another machine has finished meanwhile is not written again.

        Raises `ExecutionError` where the folder is of another plan by now.
        """
        journal = Journal(work.folder, work.digest)
        missing = []
        for shard in work.shards:
            retained = journal.record(shard)
            if retained is None:
                missing.append(shard)
            else:
                progress(shard.data_bytes)
                finished(shard, retained)
        attempt = journal.path / f"{uuid.uuid4().hex}.attempt"

        def publish(shard: Shard, found: Mapping[str, DeltaRetention]) -> None:
            require_begun(journal)
            (attempt / shard.filename).replace(work.folder / shard.filename)
            sync_folder(work.folder)
            journal.add(shard, found)
            finished(shard, found)

        with errors_of_the_system(None, work.folder):
            require_begun(journal)
            attempt.mkdir()
            try:
                aside = replace(work, folder=attempt, shards=tuple(missing))
                return LocalEngine(jobs=self.jobs).run(aside, finished=publish, progress=progress)
            finally:
                shutil.rmtree(attempt, ignore_errors=True)


def require_begun(journal: Journal) -> None:
    """Return if the folder is being written from the journal's plan. Raises `ExecutionError`."""
    if journal.plan_begun != journal.digest:
        raise ExecutionError(
            f"{journal.folder} was not begun from this plan, or was removed since",
            hint="all parts of one output need the same inputs, options and versions",
        )


class WorkPart(Struct, frozen=True, kw_only=True):
    """One file of a plan, or one look at the values of its inputs, with all that another machine needs to know of it."""

    work: Work
    jobs: int = 1

    @property
    def name(self) -> str:
        """The file that is written or checked."""
        return self.work.shards[0].filename if self.work.shards else self.work.checks[0].name

    @property
    def nbytes(self) -> int:
        """Bytes that it reports."""
        return sum(shard.data_bytes for shard in self.work.shards) + sum(check.nbytes for check in self.work.checks)

    def run(self, progress: Progress) -> tuple[Mapping[str, DeltaRetention], Sequence[Finding]]:
        """Write or check the file; return how much of each change survived rounding, and the findings."""
        retained: dict[str, DeltaRetention] = {}
        done = AttemptEngine(jobs=self.jobs).run(
            self.work, finished=lambda _, found: retained.update(found), progress=progress
        )
        return retained, done.findings


def require_divisible(plan: Plan) -> None:
    """Return if several machines can write the plan. Raises `UnsupportedAdapter` if it repeats a decomposition of PEFT's."""
    if plan.recomputes_inits:
        raise UnsupportedAdapter(
            "PEFT took the first factors out of the base weights by a decomposition, whose bits depend on the machine",
            hint='merge it on one machine: `engine="local"`, without a part',
        )


def parts_of(work: Work) -> Iterator[WorkPart]:
    """Yield the parts of the work, files first; each holds no more of the plan than it needs."""
    stamps = {stamp.path: stamp.for_another_machine() for stamp in work.plan.inputs}
    rest = replace(
        work.plan,
        shards=(),
        side_files=(),
        leftovers=(),
        inputs=(),
        manifest={},
        input_names={},
        hashed=(),
        findings=(),
        values=None,
        warnings=(),
        notes=(),
    )
    for shard in work.shards:
        inputs = tuple(stamps[path] for path in sorted(_read_by(shard)))
        plan = replace(rest, shards=(shard,), inputs=inputs)
        yield WorkPart(work=replace(work, plan=plan, shards=(shard,), checks=()))
    for check in work.checks:
        yield WorkPart(work=replace(work, plan=rest, shards=(), checks=(check,)))


def _read_by(shard: Shard) -> set[Path]:
    """Return the input files that the shard is made of."""
    tensors = (tensor for step in shard.steps for tensor in step.op.inputs)
    return {place.path for tensor in tensors for place in tensor.places}


# Writing one share of a plan's files: every share writes into the same unfinished folder, and one run finishes it.


class ShareWritten(Shown, Struct, frozen=True, kw_only=True):
    """The state of an unfinished folder after one share was written."""

    out: Path
    share: Share
    files: tuple[str, ...]
    """The files of the share."""
    nbytes: int
    """How many bytes their tensors have."""
    missing: tuple[str, ...]
    """Files of other shares that are not finished yet."""

    def __str__(self) -> str:
        wrote = f"part {self.share} written: {counted(len(self.files), 'weight file')}, {size(self.nbytes)}"
        left = (
            f"{counted(len(self.missing), 'file')} of other parts still missing" if self.missing else "none is missing"
        )
        return f"{wrote}; {left}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "schema_version": 1,
            "output": str(self.out),
            "part": str(self.share),
            "files": list(self.files),
            "bytes": self.nbytes,
            "missing": list(self.missing),
        }


def shards_of(plan: Plan, share: Share) -> tuple[Shard, ...]:
    """Return the files of the plan that are this share: of all sizes, so that shares are of about the same."""
    return share.among(sorted(plan.shards, key=lambda shard: (-shard.data_bytes, shard.filename)))


def bytes_of(plan: Plan, share: Share) -> int:
    """Return how many bytes the share reports to its progress."""
    checks = share.among(plan.values.parts) if plan.values else ()
    return sum(shard.data_bytes for shard in shards_of(plan, share)) + sum(check.nbytes for check in checks)


@named_in_errors
def execute_share(
    plan: Plan,
    out: str | os.PathLike[str],
    share: Share,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ShareWritten:
    """Write the files of one `share` of the `plan` into the unfinished folder of `out`; return its state.

    Shares may be written one after the other or at the same time, on one machine or on several that share the storage,
    and again: finished files are kept. `execute` with `resume` finishes the folder. `jobs`, `overwrite`
    and `progress`, which is called with `bytes_of` the share, are those of `execute`. Raises as `execute` and
    `require_divisible` do, and `OutputExists` where the unfinished folder is of another plan.
    """
    require_divisible(plan)
    check_output(Path(out), overwrite=overwrite, inputs=tuple(plan.folders))
    target, shards = real_place(Path(out)), shards_of(plan, share)
    with errors_of_the_system(None, target), Sources(plan.inputs) as sources, shared_folder(target) as folder:
        journal = Journal(folder, digest_of(plan))
        if journal.plan_begun not in (None, journal.digest):
            raise OutputExists(
                f"{folder} was begun from another plan: with other inputs, options or versions",
                hint=f"give every part the same inputs and options, or remove the unfinished output: rm -r {shlex.quote(str(folder))}",
            )
        journal.begin()
        with at_work(journal, f"part {share}", alone=False):
            advance = progress or (lambda _: None)
            finished = journal.finished(shards)
            missing = tuple(shard for shard in shards if shard.filename not in finished)
            check_space(target, sum(shard.data_bytes for shard in missing))
            advance(sum(shard.data_bytes for shard in shards if shard.filename in finished))
            checks = share.among(recorded_looks(plan, journal))
            unhashed = replace(plan, hashed=())  # the manifest is written by the run that finishes the folder
            work = Work(plan=unhashed, folder=folder, digest=journal.digest, shards=missing, checks=checks)
            done = AttemptEngine(jobs=jobs).run(work, finished=lambda *_: None, progress=advance)
            refuse_errors(done.findings, plan.values.ignored if plan.values else ())
            sources.check_unchanged()
            left = tuple(shard.filename for shard in plan.shards if not journal.has_record(shard))
    return ShareWritten(
        out=Path(out),
        share=share,
        files=tuple(shard.filename for shard in shards),
        nbytes=sum(shard.data_bytes for shard in shards),
        missing=left,
    )


# The engine of several machines: every file of a plan is a task on a cluster, over storage that all nodes share.


class OnCluster(Struct, frozen=True, kw_only=True):
    """The nodes of `cluster`: an `Engine` for `execute`."""

    cluster: Cluster
    written: OnWritten | None = None
    """Called with each file that is on the disk."""

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
                if self.written is not None:
                    self.written(work.folder, shard)

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
