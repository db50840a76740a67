"""Writing files of a folder that others write to as well: each file is made aside, and renamed when it is on the disk.

What is done is recorded in the folder's journal. So a file may be written twice, or by two machines at the same time:
both make the same bytes, and the later rename replaces the earlier file.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from lora_tool.core.errors import ExecutionError, UnsupportedAdapter
from lora_tool.core.progress import Progress
from lora_tool.core.report import Finding
from lora_tool.execution.folder import errors_of_the_system, sync_folder
from lora_tool.execution.journal import Journal, retained_in
from lora_tool.execution.local_engine import LocalEngine
from lora_tool.execution.work import Finished, Work, WorkDone
from lora_tool.plans.core.delta_retention import DeltaRetention
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
            record = journal.record(shard)
            if record is None:
                missing.append(shard)
            else:
                progress(shard.data_bytes)
                finished(shard, retained_in(record["notes"]))
        attempt = journal.path / f"{uuid.uuid4().hex}.attempt"

        def publish(shard: Shard, found: Mapping[str, DeltaRetention]) -> None:
            require_begun(journal)
            (attempt / shard.filename).replace(work.folder / shard.filename)
            sync_folder(work.folder)
            journal.add(shard, {name: asdict(each) for name, each in found.items()})
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


class Part(Struct, frozen=True, kw_only=True):
    """One file of a plan, or one look at the values of its inputs, with all that another machine needs to know of it."""

    work: Work
    jobs: int = 1

    @property
    def name(self) -> str:
        """The file that is written or looked at."""
        return self.work.shards[0].filename if self.work.shards else self.work.checks[0].name

    @property
    def nbytes(self) -> int:
        """Bytes that it reports."""
        return sum(shard.data_bytes for shard in self.work.shards) + sum(check.nbytes for check in self.work.checks)

    def run(self, progress: Progress) -> tuple[Mapping[str, DeltaRetention], Sequence[Finding]]:
        """Write the file, or look; return what rounding left of each change in it, and what was found."""
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


def parts_of(work: Work) -> Iterator[Part]:
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
        yield Part(work=replace(work, plan=plan, shards=(shard,), checks=()))
    for check in work.checks:
        yield Part(work=replace(work, plan=rest, shards=(), checks=(check,)))


def _read_by(shard: Shard) -> set[Path]:
    """Return the input files that the shard is made of."""
    tensors = (tensor for step in shard.steps for tensor in step.op.inputs)
    return {place.path for tensor in tensors for place in tensor.places}
