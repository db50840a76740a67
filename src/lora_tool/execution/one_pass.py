"""Several plans over the same inputs, written in one pass: what they read alike is read once, and used for each."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from msgspec import Struct

from lora_tool.batches import batches_of_bytes
from lora_tool.errors import LoraToolError
from lora_tool.execution.backends.choosing import ChooseBackend, backend_for
from lora_tool.execution.local_engine import LocalEngine, Run, prepared
from lora_tool.execution.output import ShardFile, most_open
from lora_tool.execution.past_cache import exceeds_memory
from lora_tool.execution.shared_reading import MOST_HELD, Block, SharedSources
from lora_tool.execution.units import ComputeUnit, CopyUnit, GatherUnit, Unit, units_of
from lora_tool.execution.work import Ended, Unfinished, WorkDone
from lora_tool.machine import available_cores
from lora_tool.plan.core.factor_ops import FactorOp
from lora_tool.plan.core.manifest import sha256_of
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.steps import Shard
from lora_tool.report import Finding

MOST_PLANS = 8
"""Plans of one pass: reading takes an eighth then, and no more folders than that are unfinished at a time."""
_COPY_BYTES = 4 << 20
"""Bytes that are copied to all folders before the next are read: they stay in the cache."""
_BATCH_BYTES = 16 << 20


def most_plans(jobs: int | None) -> int:
    """Return how many plans one pass can write with the open files that the system allows."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_PLANS
    return max(1, min(MOST_PLANS, allowed // 2 // most_open(jobs or available_cores())))


class OnePassEngine(Struct, frozen=True, kw_only=True):
    """Threads of this process. Memory is a block of at most 32 MiB for each, and for each plan what `LocalEngine` needs."""

    jobs: int | None = None
    choose: ChooseBackend = backend_for

    def run_each(self, folders: Sequence[Unfinished]) -> list[Ended]:
        """Write the weight files of all folders, whose plans have one precision, and return how each ended.

        An error of one folder stops no other.
        """
        if len(folders) == 1 or any(each.work.plan.recomputes_inits for each in folders):
            return [self._alone(each) for each in folders]
        jobs = self.jobs or available_cores()
        precision = folders[0].work.plan.precision
        batches = list(_batches([each.work.shards for each in folders], partial(self._units, precision)))
        units = (unit for batch in batches for piece in batch for _, _, unit in piece.units)
        stamps = {stamp.path: stamp for each in folders for stamp in each.work.plan.inputs}
        with (
            contextlib.closing(SharedSources(stamps.values())) as sources,
            prepared(units, precision, jobs, choose=self.choose),
        ):
            flusher = ThreadPoolExecutor(1)
            cached = not exceeds_memory(sum(each.work.plan.data_bytes for each in folders))
            runs = [
                Run(self.choose, each.work, sources, each.finished, each.progress, cached, flusher=flusher)
                for each in folders
            ]
            return _Pass(sources, runs, flusher).all(batches, jobs)

    def _alone(self, folder: Unfinished) -> Ended:
        try:
            folder.write(LocalEngine(jobs=self.jobs, choose=self.choose))
        except (LoraToolError, OSError) as error:
            return error
        return folder.done

    def _units(self, precision: Precision, shard: Shard) -> Iterator[Unit]:
        return units_of(shard, whole=lambda op: self.choose(precision, op).whole_tensors)


Placed = tuple[int, str, Unit]
"""The number of a plan, the name of a file of it, and a unit of that."""


class Piece(Struct, frozen=True):
    """What several plans make of one `block` of the inputs."""

    block: Block | None
    units: Sequence[Placed]

    @property
    def nbytes(self) -> int:
        return sum(unit.nbytes for _, _, unit in self.units)


_Files = Mapping[tuple[int, str], ShardFile]
"""The files that are written, by the number of their plan and their name."""


class _Pass(Struct, frozen=True):
    """What the threads of one pass share."""

    sources: SharedSources
    runs: Sequence[Run]
    flusher: ThreadPoolExecutor

    def all(self, batches: Sequence[Sequence[Piece]], jobs: int) -> list[Ended]:
        """Write all files; return how it ended for each plan when all are on the disk."""
        with (
            contextlib.ExitStack() as closing,
            self.flusher,
            ThreadPoolExecutor(jobs) as workers,
            self._interrupts_stop_all(),
        ):
            files = self._files(batches, jobs)
            for file in files.values():
                closing.callback(file.close)
            beside = [_Beside.begun(run, workers) for run in self.runs]
            tasks = [workers.submit(self._write, batch, files) for batch in batches]
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            first: dict[int, LoraToolError | OSError] = {}
            for task in done:
                first = task.result() | first
            return [
                first[number] if number in first else beside[number].ended(run) for number, run in enumerate(self.runs)
            ]

    @contextlib.contextmanager
    def _interrupts_stop_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for run in self.runs:
                run.stop.set()
            raise

    def _files(self, batches: Iterable[Iterable[Piece]], jobs: int) -> _Files:
        counts = Counter(place for batch in batches for place in _places(batch))
        files = {}
        for number, run in enumerate(self.runs):
            slots = threading.Semaphore(most_open(jobs))
            for shard in run.work.shards:
                place = number, shard.filename
                file = run.file(shard, counts[place], slots)
                if file is not None:
                    files[place] = file
        return files

    def _write(self, batch: Sequence[Piece], files: _Files) -> dict[int, LoraToolError | OSError]:
        """Write the pieces for each plan, unless it has been stopped; return the errors, by the plan's number."""
        errors: dict[int, LoraToolError | OSError] = {}
        unwritten = set()
        for piece in batch:
            going_on = [each for each in piece.units if each[0] not in unwritten]
            shared = piece.block is not None and len(going_on) > 1
            with self.sources.holding(piece.block) if piece.block and shared else contextlib.nullcontext():
                for number, name, unit in going_on:
                    try:
                        if not self.runs[number].write(unit, files[number, name]):
                            unwritten.add(number)
                    except (LoraToolError, OSError) as error:
                        unwritten.add(number)
                        errors.setdefault(number, error)
        # no early write-back: each of so many small stretches would cost a drain of every core's page lists
        for number, name in _places(batch):
            if number not in unwritten:
                self.runs[number].end((), files[number, name])  # nobody looks at what is whole before all is
        return errors


class _Beside(Struct, frozen=True):
    """What is done for a plan beside its writing."""

    hashes: Mapping[Path, Future[str]]
    looks: Sequence[Future[list[Finding]]]

    @classmethod
    def begun(cls, run: Run, workers: ThreadPoolExecutor) -> _Beside:
        work = run.work
        hashes = {path: workers.submit(sha256_of, path) for path in work.plan.hashed}
        return cls(hashes, [workers.submit(run.look, check) for check in work.checks])

    def ended(self, run: Run) -> Ended:
        """Return how all of it ended, once the plan's files are on the disk."""
        try:
            for flush in run.flushes:
                flush.result()
            findings = [fault for look in self.looks for fault in look.result()]
            return WorkDone(hashes={path: each.result() for path, each in self.hashes.items()}, findings=findings)
        except (LoraToolError, OSError) as error:
            return error


def _places(batch: Iterable[Piece]) -> set[tuple[int, str]]:
    """Return the plans and files that a batch writes to."""
    return {(number, name) for piece in batch for number, name, _ in piece.units}


def _batches(plans: Sequence[Sequence[Shard]], units: Callable[[Shard], Iterable[Unit]]) -> Iterator[Sequence[Piece]]:
    """Yield the pieces that the plans are made of, in batches worth handing out: files of one name together."""
    names = dict.fromkeys(shard.filename for shards in plans for shard in shards)
    by_name = [{shard.filename: shard for shard in shards} for shards in plans]
    for name in names:
        listed = [list(units(shards[name])) if name in shards else [] for shards in by_name]
        yield from batches_of_bytes(_pieces(name, listed), _BATCH_BYTES)


def _pieces(name: str, plans: Sequence[Sequence[Unit]]) -> Iterator[Piece]:
    """Yield what the plans make of each block, in the order in which the first of them needs it."""
    edges = _edges(plans)
    pieces: dict[tuple[object, ...], tuple[Block | None, list[Placed]]] = {}
    for number, listed in enumerate(plans):
        for unit in itertools.chain.from_iterable(_cut(unit, edges) for unit in listed):
            block = _read_by(unit)
            key = (number, unit.begin) if block is None else block.key
            pieces.setdefault(key, (block, []))[1].append((number, name, unit))
    for block, placed in pieces.values():
        yield Piece(block, placed)


def _read_by(unit: Unit) -> Block | None:
    """Return the block that the unit is made of, besides the adapter; None where there is none, or a large one."""
    match unit:
        case CopyUnit():
            block = Block(unit.source, unit.offset, unit.nbytes)
        case GatherUnit():
            block = Block.of_tensor(unit.source, unit.start, unit.nbytes)
        case ComputeUnit() if not isinstance(unit.op, FactorOp) and unit.op.source.spans:
            source = unit.op.source
            row = source.nbytes // source.shape[0] if source.shape else source.nbytes
            block = Block.of_tensor(source, unit.first * row, (unit.last - unit.first) * row)
        case _:
            return None
    return block if block.nbytes <= MOST_HELD else None


def _edges(plans: Iterable[Iterable[Unit]]) -> dict[Path, list[int]]:
    """Return where the blocks of computed units begin and end in their files: there what others copy is cut."""
    found: dict[Path, set[int]] = defaultdict(set)
    for unit in itertools.chain.from_iterable(plans):
        block = None if isinstance(unit, CopyUnit) else _read_by(unit)
        if block is not None and isinstance(block.of, Path):
            found[block.of] |= {block.start, block.start + block.nbytes}
    return {path: sorted(offsets) for path, offsets in found.items()}


def _cut(unit: Unit, edges: Mapping[Path, Sequence[int]]) -> Iterator[Unit]:
    """Yield the unit; one that copies in parts that end at edges, or at the same places of the file for every plan."""
    if not isinstance(unit, CopyUnit):
        yield unit
        return
    first, last = unit.offset, unit.offset + unit.nbytes
    inside = edges.get(unit.source, ())
    at = bisect.bisect_right(inside, first)
    begin = first
    while begin < last:
        while at < len(inside) and inside[at] <= begin:
            at += 1
        end = min(last, (begin // _COPY_BYTES + 1) * _COPY_BYTES, inside[at] if at < len(inside) else last)
        yield CopyUnit(source=unit.source, offset=begin, nbytes=end - begin, begin=unit.begin + begin - first)
        begin = end
