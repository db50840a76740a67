"""The engine of one machine: threads copy and compute units, and files are flushed while others are written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from lora_tool.core.choices import assert_never
from lora_tool.core.display import counted
from lora_tool.core.machine import available_cores, batches_of_bytes, factor_workers
from lora_tool.core.progress import Progress, decided
from lora_tool.core.report import Finding
from lora_tool.execution.backends.backend import Backend
from lora_tool.execution.backends.choosing import ChooseBackend, backend_for, makes_factors
from lora_tool.execution.folder import write_file
from lora_tool.execution.output import Sample, ShardFile, added_up, slots_for, write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit, CopyUnit, GatherUnit, RequantiseUnit, Unit, computed_by, units_of
from lora_tool.execution.work import Finished, Work, WorkDone
from lora_tool.formats.open_files import PageBuffer
from lora_tool.plans.core.manifest import sha256_of
from lora_tool.plans.core.ops import Precision, RowOp
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard
from lora_tool.rules.training.value_check import ValuePart

if TYPE_CHECKING:
    from lora_tool.execution.requantised import Requantiser


# One worker: it copies units, and computes them with a backend of its own for each kind of arithmetic.


_BATCH_BYTES = 4 << 20


def batches_of(
    shard: Shard, precision: Precision, *, choose: ChooseBackend = backend_for
) -> tuple[tuple[Unit, ...], ...]:
    """Return the units that write a file's data, in batches worth handing out, as its arithmetic needs them."""
    units = units_of(shard, whole=lambda op: choose(precision, op).whole_tensors)
    return tuple(batches_of_bytes(units, _BATCH_BYTES))


class Worker:
    """Writes units of a plan of this precision, read from `sources`. Not shared between threads."""

    def __init__(
        self,
        sources: Sources,
        precision: Precision,
        *,
        choose: ChooseBackend = backend_for,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sources = sources
        self._room = PageBuffer()
        self._precision = precision
        self._choose = choose
        self._stopped = stopped
        self._backends: dict[type[Backend], Backend] = {}
        self._requantiser: Requantiser | None = None

    def write(self, unit: Unit, out: int) -> Sample | None:
        """Write the unit to its place in the descriptor `out`; return a sample of what rounding left of its change.

        Raises `ExecutionError` for values that must not be written, `SourceChanged`, OSError.
        """
        match unit:
            case CopyUnit():
                _copy(unit, self._sources, out)
                return None
            case ComputeUnit():
                retained = self._backend(unit.op).run(unit, out)
            case GatherUnit():
                gathered = self._room.of(unit.nbytes)
                self._sources.read_into(unit.source, unit.start, gathered)
                write_exactly(out, gathered, unit.begin)
                return None
            case RequantiseUnit():
                retained = self._of_codes.run(unit, out)
            case _:
                return assert_never(unit)
        return None if retained is None else (unit.out.name, unit.begin, retained)

    @property
    def _of_codes(self) -> Requantiser:
        if self._requantiser is None:
            from lora_tool.execution.requantised import Requantiser  # numpy, for few plans

            self._requantiser = Requantiser(self._sources, self._precision, self._stopped)
        return self._requantiser

    def _backend(self, op: RowOp) -> Backend:
        chosen = self._choose(self._precision, op)
        if chosen not in self._backends:
            self._backends[chosen] = chosen(self._sources, self._precision, self._stopped)
        return self._backends[chosen]


def _copy(unit: CopyUnit, sources: Sources, out: int) -> None:
    with sources.descriptor(unit.source) as source:
        done = _copy_in_kernel(unit, source, out)
    if done < unit.nbytes:
        rest = memoryview(bytearray(unit.nbytes - done))
        sources.read_exactly(unit.source, unit.offset + done, rest)
        write_exactly(out, rest, unit.begin + done)


def _copy_in_kernel(unit: CopyUnit, source: int, out: int) -> int:
    """Copy without passing through this process, and return how many bytes the system copied that way."""
    done = 0
    while hasattr(os, "copy_file_range") and done < unit.nbytes:
        try:
            count = os.copy_file_range(source, out, unit.nbytes - done, unit.offset + done, unit.begin + done)
        except OSError:
            break  # file systems, containers and old kernels refuse in various ways; a real error comes again, named
        if count == 0:
            break
        done += count
    return done


OnWritten = Callable[[Path, Shard], None]
"""Called with the folder that is being written and a weights file of it: what it sees is for the check of the folder to judge."""
_LOOK_BYTES = 256 << 20
"""Values that one thread looks at in one go: while it does, the others copy, and two that copy into one file or look
at values keep each other waiting. A file for each parameter took a fifth longer one by one.
"""
_Call = Callable[[], Any]
"""What a thread does from beginning to end."""
_Batches = Sequence[tuple[Shard, Sequence[Sequence[Unit]]]]


class LocalEngine(Struct, frozen=True, kw_only=True):
    """Threads of this process, which share the open inputs; memory is a few blocks for each."""

    jobs: int | None = None
    """How many; see `workers_for`."""
    choose: ChooseBackend = backend_for
    """Which arithmetic computes which operation."""
    written: OnWritten | None = None
    """Called with each file once all of it is written, by one thread at a time, while it is flushed to the disk."""

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """See `Engine`."""
        plan = work.plan
        batches = [(shard, batches_of(shard, plan.precision, choose=self.choose)) for shard in work.shards]
        # an init's decomposition has other bits with other numbers of threads, and PEFT has them all
        jobs = 1 if plan.recomputes_inits else workers_for(plan, self.jobs)
        with Sources(plan.inputs) as sources, self._arithmetic(plan, batches, jobs):
            done = _EngineRun(self, work, sources, finished, progress).all(batches, jobs)
            sources.check_unchanged()
        return done

    @contextlib.contextmanager
    def _arithmetic(self, plan: Plan, batches: _Batches, jobs: int) -> Iterator[None]:
        """Load the arithmetic of the units; inside, its libraries have no threads of their own beside the workers."""
        used: set[type[Backend]] = set()
        for _, some in batches:
            for unit in chain.from_iterable(some):
                used.update(self.choose(plan.precision, op) for op in computed_by(unit))
        with contextlib.ExitStack() as limits:
            # each is loaded once, so that one error says if it fails
            for backend in used if not plan.recomputes_inits else ():
                limits.enter_context(backend.one_thread())
            names = [backend.__name__.removesuffix("Backend").lower() for backend in used]
            computed = f"{plan.precision} precision by {' and '.join(sorted(names))}"
            what = computed if names else "every tensor is copied, none is computed"
            decided(f"arithmetic: {what}; {counted(jobs, 'worker')}")
            yield


def workers_for(plan: Plan, jobs: int | None) -> int:
    """Return how many threads work on a plan: `jobs`, by default one per available core, a few where factors are made."""
    return jobs or (factor_workers() if makes_factors(plan) else available_cores())


class _EngineRun(Struct, frozen=True):
    """What the threads that write one folder share."""

    engine: LocalEngine
    work: Work
    sources: Sources
    finished: Finished
    progress: Progress
    local: threading.local = field(default_factory=threading.local)
    stop: threading.Event = field(default_factory=threading.Event)
    flusher: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    looker: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    flushes: list[Future[None]] = field(default_factory=list)

    def all(self, batches: _Batches, jobs: int) -> WorkDone:
        """Write all files, hash and check; return when that is done. Raises the first error at once."""
        slots = slots_for(jobs)
        writes: list[_Call] = []
        with (
            contextlib.ExitStack() as files,
            ThreadPoolExecutor(jobs, initializer=self._start_worker) as workers,
            self.flusher,
            self.looker,
            self._errors_stop_all(),
        ):
            hashing = {path: hash_of(path, workers) for path in self.work.plan.hashed}
            for shard, some in batches:
                if not some:  # it has no data
                    write_file(self.work.folder / shard.filename, shard.header)
                    continue
                out = ShardFile(self.work.folder, shard, batches=len(some), slots=slots)
                files.callback(out.close)
                writes += [partial(self._write, batch, out) for batch in some]
            together = batches_of_bytes(self.work.checks, _LOOK_BYTES)
            looks: list[_Call] = [partial(self._look, checks) for checks in together]
            done = {task: workers.submit(task) for task in _spread(writes, looks)}
            _all_done(done.values())
            workers.shutdown()  # whoever looks at the last file needs memory, too
            _all_done(self.flushes)
            findings = [fault for look in looks for fault in done[look].result()]
            return WorkDone(hashes={path: digest.result() for path, digest in hashing.items()}, findings=findings)

    def _start_worker(self) -> None:
        """Give this thread a worker of its own."""
        plan, choose = self.work.plan, self.engine.choose
        self.local.worker = Worker(self.sources, plan.precision, choose=choose, stopped=self.stop.is_set)

    @contextlib.contextmanager
    def _errors_stop_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop.set()
            raise

    def _write(self, batch: Sequence[Unit], out: ShardFile) -> None:
        """Write the units, one after the other, unless the run has been stopped; the file is flushed after its last."""
        with self._errors_stop_all():
            for unit in batch:
                if self.stop.is_set() or not out.open(self.stop):
                    return
                sample = self.local.worker.write(unit, out.descriptor)
                if sample is not None:
                    out.samples.append(sample)
                self.progress(unit.nbytes)
            out.start_writing_back(batch)
            if out.end():
                self.flushes.append(self.flusher.submit(self._finish, out))
                if self.engine.written is not None:
                    self.flushes.append(self.looker.submit(self._see, out.shard, self.engine.written))

    def _finish(self, out: ShardFile) -> None:
        with self._errors_stop_all():
            out.flush()
            self.finished(out.shard, added_up(out.samples))

    def _see(self, shard: Shard, written: OnWritten) -> None:
        with self._errors_stop_all():
            if not self.stop.is_set():
                written(self.work.folder, shard)

    def _look(self, parts: Iterable[ValuePart]) -> list[Finding]:
        """Return what these parts of the check of values find, unless the run has been stopped."""
        try:
            with self._errors_stop_all():
                self._go_on(0)
                return [fault for part in parts for fault in part.run(self._go_on)]
        except CancelledError:
            return []  # what stopped the run is raised by whoever met it

    def _go_on(self, nbytes: int) -> None:
        if self.stop.is_set():
            raise CancelledError
        self.progress(nbytes)


def _spread(work: Sequence[_Call], among: Sequence[_Call]) -> list[_Call]:
    """Return the tasks of both, each in its order, evenly mixed."""
    placed = []
    for tasks in (work, among):
        placed += [((at + 0.5) / len(tasks), task) for at, task in enumerate(tasks)]
    return [task for _, task in sorted(placed, key=itemgetter(0))]


def _all_done(futures: Collection[Future[Any]]) -> None:
    """Return when all are done; raise the first error at once."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


# Hashes of files that are read whole, begun while the plan is made: one core has nothing else to do then.


_BEGUN: ContextVar[Mapping[Path, Future[str]]] = ContextVar("_BEGUN", default=MappingProxyType({}))


@contextlib.contextmanager
def hashed_meanwhile(paths: Iterable[Path]) -> Iterator[None]:
    """Hash the files while what is inside is done; give up what is not finished then. `hash_of` has the results."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        token = _BEGUN.set({path: thread.submit(sha256_of, path, ended.is_set) for path in paths})
        try:
            yield
        finally:
            _BEGUN.reset(token)
            ended.set()
            thread.shutdown(cancel_futures=True)


def hash_of(path: Path, workers: Executor) -> Future[str]:
    """Return the file's sha256, in hex, that was begun already, or is now by one of the workers."""
    return _BEGUN.get().get(path) or workers.submit(sha256_of, path)
