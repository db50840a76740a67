"""Execute a plan: prepare a hidden folder, have an engine write the weight files, add the rest, and rename last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lora_tool.core.engines import Spread
from lora_tool.core.errors import ExecutionError, LoraToolError
from lora_tool.core.options import named_in_errors
from lora_tool.core.progress import Progress
from lora_tool.core.report.model import refuse_errors
from lora_tool.execution.at_work import at_work
from lora_tool.execution.backends.choosing import arithmetic_of
from lora_tool.execution.folder import (
    check_output,
    check_space,
    copy_file,
    errors_of_the_system,
    new_folder,
    real_place,
    sync_folder,
    write_file,
)
from lora_tool.execution.journal import Journal, digest_of, recorded_looks
from lora_tool.execution.local_engine import LocalEngine, OnWritten
from lora_tool.execution.reading import Sources
from lora_tool.execution.work import Engine, Work
from lora_tool.formats import manifest as manifest_format
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.manifest import manifest_bytes
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard, SideFile


def engine_of(spread: Spread, *, jobs: int | None, written: OnWritten | None = None) -> Engine:
    """Return the engine that was asked for, which calls `written`; on this machine it has `jobs` workers."""
    if spread.cluster is None:
        return LocalEngine(jobs=jobs, written=written)
    from lora_tool.execution.attempts import OnCluster  # for few runs

    return OnCluster(cluster=spread.cluster, written=written)


FolderCheck = Callable[[Path], Mapping[str, Any]]
"""Called with the finished folder before the rename: returns an entry for the manifest, or raises to refuse the folder."""


@named_in_errors
def execute(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    engine: Engine | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    check: FolderCheck | None = None,
) -> Path:
    """Write the folder that `plan` describes as `out` and return its path.

    The folder appears under that name complete and flushed to disk, or not at all. `engine` writes the weight files, by
    default a `LocalEngine` of `jobs` workers. `overwrite` replaces an existing folder once the new one is whole.
    `progress` is called with the number of weight bytes written. `resume` reuses the files that a killed run of the
    same plan had finished, and keeps its own after a failure. `plan.values`, the check of the inputs' values, runs
    during the writing; its errors refuse the folder. `check` sees the finished folder before the rename and refuses it
    by raising. Raises `OutputExists`, `OutOfSpace`, `SourceChanged`, `ExecutionError`, `FindingsFound`, and what
    `check` raises.
    """
    check_output(Path(out), overwrite=overwrite, inputs=tuple(plan.folders))
    target, advance = real_place(Path(out)), progress or (lambda _: None)
    with (
        errors_of_the_system(None, target),
        Sources(plan.inputs) as sources,
        new_folder(target, overwrite=overwrite, resume=resume) as folder,
        _begun(folder, digest_of(plan), shared=resume) as journal,
    ):
        retained: dict[str, DeltaRetention] = {}
        missing = plan.shards
        if resume:
            finished = journal.finished(plan.shards)
            journal.keep_only(finished)
            missing = tuple(shard for shard in plan.shards if shard.filename not in finished)
            advance(sum(shard.data_bytes for shard in plan.shards if shard.filename in finished))
            for found in finished.values():
                retained.update(found)
        check_space(target, sum(map(attrgetter("nbytes"), (*missing, *plan.side_files))))

        def on_disk(shard: Shard, found: Mapping[str, DeltaRetention]) -> None:
            retained.update(found)
            if not journal.has_record(shard):  # another machine that wrote the file has recorded it
                journal.add(shard, found)

        checks = recorded_looks(plan, journal)
        work = Work(plan=plan, folder=folder, digest=journal.digest, shards=missing, checks=checks)
        with _refusals(journal):
            done = (engine or LocalEngine(jobs=jobs)).run(work, finished=on_disk, progress=advance)
            kept = refuse_errors(done.findings, plan.values.ignored if plan.values else ())
        for file in plan.side_files:
            _write_side_file(folder, file)
        with _refusals(journal):
            verification = check(folder) if check is not None else None
        plan = replace(plan, warnings=(*plan.warnings, *map(str, kept)))
        manifest = manifest_bytes(plan, done.hashes, retained, arithmetic_of(plan), verification)
        write_file(folder / manifest_format.FILE_NAME, manifest)
        sources.check_unchanged()
        journal.remove()
    return Path(out)


@contextlib.contextmanager
def _begun(folder: Path, digest: str, *, shared: bool) -> Iterator[Journal]:
    """Yield the journal of the folder, which nobody else writes to inside. Raises `OutputExists` where somebody does."""
    journal = Journal(folder, digest)
    with at_work(journal, "another run", alone=True) if shared else contextlib.nullcontext():
        journal.begin()
        yield journal


@contextlib.contextmanager
def _refusals(journal: Journal) -> Iterator[None]:
    """Where a check refuses the folder, discard its files, so that `resume` reuses none; after a failure they stay."""
    try:
        yield
    except ExecutionError:
        raise
    except LoraToolError:
        journal.remove()
        raise


def _write_side_file(folder: Path, file: SideFile) -> None:
    path = folder / file.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.source is None:
        write_file(path, file.content or b"")
    else:
        copy_file(path, file.source)
    for above in path.relative_to(folder).parents[:-1]:  # the folder itself is flushed when all is in it
        sync_folder(folder / above)
