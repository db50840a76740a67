"""Executing a plan: workers copy and compute units, files are flushed while others are written, names appear last."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tool.cores import available_cores
from lora_tool.errors import ExecutionError, LoraToolError, OutOfSpace
from lora_tool.execution.folder import (
    check_output,
    check_space,
    copy_file,
    new_folder,
    real_place,
    sync_folder,
    write_file,
)
from lora_tool.execution.journal import Journal
from lora_tool.execution.output import MOST_OPEN, ShardFile, write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit, CopyUnit, Unit, batches, units_of
from lora_tool.formats import manifest as manifest_format
from lora_tool.plan.core.delta_retention import DeltaRetention
from lora_tool.plan.core.manifest import manifest_bytes, sha256_of
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import Shard, SideFile
from lora_tool.progress import Progress
from lora_tool.report import Finding
from lora_tool.sharded.value_check import ValueCheck

if TYPE_CHECKING:
    from typing_extensions import Self

    from lora_tool.execution.compute import Computer
    from lora_tool.execution.torch_compute import TorchComputer

Check = Callable[[Path], Mapping[str, Any]]
"""Called with the finished folder before it gets its name: returns what the manifest is to say, or raises."""

Task = Callable[[], Any]
"""What a worker does from beginning to end."""


def execute(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    check: Check | None = None,
    values: ValueCheck | None = None,
) -> Path:
    """Write the folder that `plan` describes as `out` and return its path.

    It appears under that name complete and flushed to disk, or not at all. Anonymous memory is a few blocks per
    worker; `jobs` workers, by default one per available core. `resume` takes over the files that a killed run of the
    same plan had finished, and leaves its own after a failure. `values` is run while the files are written, because the
    one waits for the processor and the other for the disk. `check` may look at the folder before it gets its name.
    Either may refuse it by raising. Raises `OutputExists`, `OutOfSpace`, `SourceChanged`, `ExecutionError`, and what
    `values` and `check` raise.
    """
    check_output(Path(out), overwrite=overwrite, inputs=tuple({stamp.path.parent for stamp in plan.inputs}))
    target = real_place(Path(out))
    with (
        _errors_of_the_system(target),
        Sources(plan.inputs) as sources,
        new_folder(target, overwrite=overwrite, resume=resume) as folder,
    ):
        journal = Journal(folder, plan)
        finished = journal.finished({shard.filename: shard for shard in plan.shards})
        check_space(target, _bytes_to_write(plan, finished))
        advance = progress or (lambda _: None)
        advance(sum(shard.data_bytes for shard in plan.shards if shard.filename in finished))
        writing = _Writing(plan, sources, journal, advance)
        writing.take_over(finished)
        jobs = 1 if plan.recomputes_inits else jobs or available_cores()
        with _one_thread_each(plan), _refusals(journal):
            hashes, found = _write_shards(plan, folder, writing, jobs=jobs, finished=finished, values=values)
            kept = values.judge(found) if values else []
        for file in plan.side_files:
            _write_side_file(folder, file)
        with _refusals(journal):
            verification = check(folder) if check is not None else None
        plan = replace(plan, warnings=(*plan.warnings, *map(str, kept)))
        write_file(folder / manifest_format.FILE_NAME, manifest_bytes(plan, hashes, writing.survived, verification))
        sources.check_unchanged()
        journal.remove()
    return Path(out)


@contextlib.contextmanager
def _refusals(journal: Journal) -> Iterator[None]:
    """Let nothing that was written be taken over by a later run where a check refuses, as against a failure."""
    try:
        yield
    except ExecutionError:
        raise
    except LoraToolError:
        journal.remove()
        raise


def _bytes_to_write(plan: Plan, finished: Collection[str]) -> int:
    shards = sum(len(s.header) + s.data_bytes for s in plan.shards if s.filename not in finished)
    return shards + sum(_side_size(file) for file in plan.side_files)


def _side_size(file: SideFile) -> int:
    return len(file.content) if file.content is not None else file.source.stat().st_size if file.source else 0


def _write_side_file(folder: Path, file: SideFile) -> None:
    path = folder / file.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.source is None:
        write_file(path, file.content or b"")
    else:
        copy_file(path, file.source)
    for above in path.relative_to(folder).parents[:-1]:  # the folder itself is flushed when all is in it
        sync_folder(folder / above)


@contextlib.contextmanager
def _errors_of_the_system(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{target}: the disk is full; nothing was kept", hint="give another disk: -o OUT"
            ) from error
        raise ExecutionError(f"{error.filename or target}: {error.strerror}") from error


class _Writing:
    """What the workers of one run share."""

    def __init__(self, plan: Plan, sources: Sources, journal: Journal, progress: Progress) -> None:
        self._plan = plan
        self._sources = sources
        self._journal = journal
        self._progress = progress
        self._local = threading.local()
        self._flusher = ThreadPoolExecutor(1)
        self._flushes: list[Future[None]] = []
        self._computers: list[Computer | TorchComputer] = []
        self.survived: dict[str, DeltaRetention] = {}
        """Output tensor → how much of its change survived rounding, for the files that are finished."""
        self._stop = threading.Event()

    def run(self, batch: Sequence[Unit], out: ShardFile) -> None:
        """Write the units, one after the other, unless the run has been stopped; an error stops it."""
        try:
            for unit in batch:
                if self._stop.is_set() or not out.open(self._stop):
                    return
                if isinstance(unit, CopyUnit):
                    _copy(unit, self._sources, out.descriptor)
                else:
                    self._computer(unit).run(unit, out.descriptor)
                self._progress(unit.nbytes)
            out.start_writing_back(batch)
            if not self._stop.is_set() and out.is_complete():
                self._flushes.append(self._flusher.submit(self._finish, out))
        except BaseException:
            self._stop.set()
            raise

    def look(self, part: Callable[[Progress], list[Finding]]) -> list[Finding]:
        """Return what a part of the check of values finds, unless the run has been stopped; an error stops it."""
        try:
            self._go_on(0)
            return part(self._go_on)
        except CancelledError:
            return []  # what stopped the run is raised by whoever met it
        except BaseException:
            self._stop.set()
            raise

    def _go_on(self, nbytes: int) -> None:
        if self._stop.is_set():
            raise CancelledError
        self._progress(nbytes)

    def _computer(self, unit: ComputeUnit) -> Computer | TorchComputer:
        """Return this thread's own, of the kind that the unit needs."""
        torch = (self._plan.precision is Precision.PEFT or bool(unit.op.taken_out)) and not unit.op.is_copy
        name = "torch" if torch else "numpy"
        if not hasattr(self._local, name):
            new = self._new_computer(torch=torch)
            self._computers.append(new)
            setattr(self._local, name, new)
        computer: Computer | TorchComputer = getattr(self._local, name)
        return computer

    def _new_computer(self, *, torch: bool) -> Computer | TorchComputer:
        if torch:
            from lora_tool.execution.torch_compute import TorchComputer  # noqa: PLC0415 - torch only when asked for

            return TorchComputer(self._sources, self._stop.is_set)
        from lora_tool.execution.compute import Computer  # noqa: PLC0415 - a plan of copies needs no arithmetic

        return Computer(self._sources, self._plan.precision, self._stop.is_set)

    def _finish(self, out: ShardFile) -> None:
        try:
            out.flush()
            survived = self._survived_in(out.shard)
            self.survived |= survived
            self._journal.add(out.shard, {name: [s.meant, s.written, s.shared] for name, s in survived.items()})
        except BaseException:
            self._stop.set()
            raise

    def wait(self, written: Collection[Future[Any]]) -> None:
        """Return when everything is written and on the disk; raise the first error at once."""
        _all_done(written)
        for flush in self._flushes:
            flush.result()

    def _survived_in(self, shard: Shard) -> dict[str, DeltaRetention]:
        """Return the samples of a written file's tensors, added in one order whoever took them."""
        survived = {}
        for step in shard.steps:
            name = step.out.name
            samples = [sample for computer in tuple(self._computers) for sample in computer.survived.pop(name, ())]
            if samples:
                survived[name] = sum((found for _, found in sorted(samples, key=itemgetter(0))), DeltaRetention())
        return survived

    def take_over(self, finished: Mapping[str, Any]) -> None:
        """Take what was noted of files that an earlier run had finished."""
        for notes in finished.values():
            for name, (meant, written, shared) in (notes or {}).items():
                self.survived[name] = DeltaRetention(meant=meant, written=written, shared=shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is not None:
            self._stop.set()  # units see it and return
        self._flusher.shutdown()


def _write_shards(
    plan: Plan,
    folder: Path,
    writing: _Writing,
    *,
    jobs: int,
    finished: Collection[str],
    values: ValueCheck | None,
) -> tuple[dict[Path, str], list[Finding]]:
    """Write all weight files that are not finished; return the hashes of `plan.hashed` and what `values` found."""
    slots = threading.Semaphore(max(MOST_OPEN, jobs + 1))
    work: list[Task] = []
    with contextlib.ExitStack() as files, ThreadPoolExecutor(jobs) as workers, writing:
        hashing = {path: workers.submit(sha256_of, path) for path in plan.hashed}
        for shard in plan.shards:
            if shard.filename in finished:
                continue
            units = tuple(batches(units_of(shard, whole_tensors=plan.precision is Precision.PEFT)))
            if not units:
                write_file(folder / shard.filename, shard.header)
                continue
            out = ShardFile(folder, shard, batches=len(units), slots=slots)
            files.callback(out.close)
            work += [partial(writing.run, batch, out) for batch in units]
        looks: list[Task] = [partial(writing.look, part) for part in values.parts] if values else []
        done = {task: workers.submit(task) for task in _spread(work, looks)}
        writing.wait(done.values())
        found = [fault for look in looks for fault in done[look].result()]
        return {path: digest.result() for path, digest in hashing.items()}, found


def _spread(work: Sequence[Task], among: Sequence[Task]) -> Iterator[Task]:
    """Yield the tasks of both, each in its order, evenly mixed."""
    placed = [((at + 0.5) / len(tasks), task) for tasks in (work, among) for at, task in enumerate(tasks)]
    return (task for _, task in sorted(placed, key=itemgetter(0)))


def _all_done(futures: Collection[Future[Any]]) -> None:
    """Return when all are done; raise the first error at once."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


@contextlib.contextmanager
def _one_thread_each(plan: Plan) -> Iterator[None]:
    """Keep every library's own threads away from ours: the workers are the threads.

    Not where an init is recomputed: the bits of a decomposition depend on the number of threads, and PEFT has them all.
    """
    with contextlib.ExitStack() as limits:
        if not plan.recomputes_inits and not plan.only_copies:
            from threadpoolctl import threadpool_limits  # noqa: PLC0415 - it looks through every loaded library

            # the workers would all load it at once, and where that fails only one of them is told why
            import lora_tool.execution.compute  # noqa: F401, PLC0415

            limits.enter_context(threadpool_limits(limits=1, user_api="blas"))
        if plan.precision is Precision.PEFT and not plan.recomputes_inits:
            from lora_tool.execution.torch_compute import one_thread  # noqa: PLC0415 - torch only when asked for

            limits.enter_context(one_thread())
        yield


def _copy(unit: CopyUnit, sources: Sources, out: int) -> None:
    with sources.descriptor(unit.source) as source:
        done = _copy_in_kernel(unit, source, out)
    if done < unit.nbytes:
        rest = memoryview(bytearray(unit.nbytes - done))
        sources.read_exactly(unit.source, unit.offset + done, rest)
        write_exactly(out, rest, unit.at + done)


def _copy_in_kernel(unit: CopyUnit, source: int, out: int) -> int:
    """Copy without passing through this process, and return how many bytes the system was willing to copy so."""
    done = 0
    while hasattr(os, "copy_file_range") and done < unit.nbytes:
        try:
            count = os.copy_file_range(source, out, unit.nbytes - done, unit.offset + done, unit.at + done)
        except OSError:
            break  # file systems, containers and old kernels refuse in various ways; a real error comes again, named
        if count == 0:
            break
        done += count
    return done
