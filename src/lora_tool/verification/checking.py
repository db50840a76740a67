"""Comparing the tensors of a folder with the plan that should have made them, in parallel and in bounded memory."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from threadpoolctl import threadpool_limits

from lora_tool.choices import Choice
from lora_tool.cores import available_cores
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import Step
from lora_tool.progress import Progress
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.tensors import TensorTable
from lora_tool.verification.bounds import sixteen_bit_bound, stated_bound, working_type
from lora_tool.verification.diagnosis import evidence_of
from lora_tool.verification.files import Files, Rows, rows_and_columns
from lora_tool.verification.initial import CannotTellError
from lora_tool.verification.parts import Compared, parts_of
from lora_tool.verification.pieces import blocks, sampled_rows, sampled_stretches, stretches
from lora_tool.verification.recompute import Recomputer, why_not
from lora_tool.verification.tally import Tally, compare

Item = TypeVar("Item")

_TASK_PARTS = 16
"""Blocks or stretches per task: enough that handing it out costs nothing."""


@enum.unique
class Level(Choice):
    """How much is read."""

    SAMPLE = "sample"
    """Rows of what was changed and pieces of what was copied, from everywhere: a small part of the merge's time."""
    FULL = "full"
    """Every value of every tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Compared of the comparison of the tensors' part `number`: ranges of rows to recompute, or stretches of bytes."""

    number: int
    part: Compared
    rows: tuple[Rows, ...] = ()
    stretches: tuple[tuple[int, int], ...] = ()


def check_tensors(
    plan: Plan,
    tensors: TensorTable,
    *,
    level: Level = Level.FULL,
    precision: Precision | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TensorEvidence]:
    """Return the evidence of every planned tensor that `tensors` has with the planned shape.

    `precision` is the arithmetic that made them, None where that is not known: then what 16-bit arithmetic explains is
    right, too. Raises `SourceChanged` or OSError where a file cannot be read to its end.
    """
    steps = tuple(_present(plan, tensors))
    parts: list[Compared] = []
    owned: dict[str, range] = {}
    for step in steps:
        begin = len(parts)
        parts += parts_of(step, tensors[step.out.name])
        owned[step.out.name] = range(begin, len(parts))
    tallies = [Tally() for _ in parts]
    with Files() as files, threadpool_limits(limits=1, user_api="blas"):
        for number, tally in _in_parallel(_tasks(parts, level), files, precision, jobs, progress or (lambda _: None)):
            tallies[number].add(tally)
        return {
            step.out.name: evidence_of(
                step, [(parts[at], tallies[at]) for at in owned[step.out.name]], files, stated=precision is not None
            )
            for step in steps
        }


def _present(plan: Plan, tensors: TensorTable) -> Iterator[Step]:
    for step in plan.steps:
        stored = tensors.get(step.out.name)
        same_kind = stored is not None and stored.dtype.is_float == step.out.dtype.is_float
        if stored is not None and stored.shape == step.out.shape and same_kind:
            yield step


def _tasks(parts: Sequence[Compared], level: Level) -> Iterator[_Task]:
    for number, part in enumerate(parts):
        if part.copied or (why_not(part.op) is not None and _comparable(part)):
            found = stretches(part.stored) if level is Level.FULL else sampled_stretches(part.stored)
            for some in _grouped(list(found)):
                yield _Task(number=number, part=part, stretches=tuple(some))
        elif why_not(part.op) is None and part.stored.spec.numel:
            rows = list(blocks(part.stored) if level is Level.FULL else sampled_rows(part.stored, part.op))
            # once, not once per task: the norms of DoRA on a weight stored [in, out] take a pass over all of it, and an
            # init is a decomposition of all of it
            for group in [rows] if part.op.needs_all_rows else _grouped(rows):
                yield _Task(number=number, part=part, rows=tuple(group))


def _comparable(part: Compared) -> bool:
    """Whether its bytes tell if it is still its source: all that can be said of what is not recomputed."""
    return part.stored.dtype is part.op.source.dtype and part.stored.nbytes == part.op.source.nbytes


def _grouped(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for at in range(0, len(items), _TASK_PARTS):
        yield items[at : at + _TASK_PARTS]


def _in_parallel(
    tasks: Iterator[_Task], files: Files, precision: Precision | None, jobs: int | None, progress: Progress
) -> Iterator[tuple[int, Tally]]:
    stop = threading.Event()
    local = threading.local()

    def run(task: _Task) -> Tally:
        if not hasattr(local, "recomputer"):
            local.recomputer = Recomputer(files)
        tally = Tally()
        try:
            for part in _run(task, files, local.recomputer, precision):
                tally.add(part)
                if stop.is_set():
                    break
                progress(part.compared * task.part.stored.dtype.bits // 8)
        except CannotTellError as why:
            return _unknown(task.part, files, str(why))
        return tally

    with ThreadPoolExecutor(jobs or available_cores()) as workers:
        try:
            futures: list[tuple[int, Future[Tally]]] = [(task.number, workers.submit(run, task)) for task in tasks]
            for number, future in futures:
                yield number, future.result()
        except BaseException:
            stop.set()
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def _run(task: _Task, files: Files, recomputer: Recomputer, precision: Precision | None) -> Iterator[Tally]:
    part = task.part
    if task.stretches:
        for start, nbytes in task.stretches:
            yield _compare_bytes(part, files, start, nbytes)
        return
    dtype = part.stored.dtype
    if part.op.taken_out and part.op.source.dtype is not dtype:
        raise CannotTellError(
            f"{part.op.taken_out} was taken out of the base as {dtype}, and the base is {part.op.source.dtype}"
        )
    wide = working_type(part.op, dtype)
    bound = stated_bound(part.op, dtype, precision or Precision.FLOAT32)
    loose = None if precision else sixteen_bit_bound(part.op, dtype)
    width = rows_and_columns(part.stored.shape)[1]
    for rows in task.rows:
        with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
            for some, expected in recomputer.blocks(part.op, rows, wide):
                stored = files.rows(part.stored, some)
                position = partial(_flat, rows=some, width=width, begin=part.begin)
                yield compare(stored, dtype, expected, bound, loose, position)


def _unknown(part: Compared, files: Files, why: str) -> Tally:
    """Return that nothing is known of the part but whether it is still its source."""
    tally = Tally(unknown=why)
    for start, nbytes in stretches(part.stored) if _comparable(part) else ():
        tally.add(_compare_bytes(part, files, start, nbytes))
    return tally


def _flat(at: int, *, rows: Rows, width: int, begin: int) -> int:
    """Return the flat index in the tensor of value `at` of a block of rows."""
    row, column = divmod(at, width)
    for first, last in rows:
        if row < last - first:
            return begin + (first + row) * width + column
        row -= last - first
    raise AssertionError("a value of the block is in one of its rows")


def _compare_bytes(part: Compared, files: Files, start: int, nbytes: int) -> Tally:
    """Compare a stretch of a copied tensor byte by byte."""
    stored, source = files.read(part.stored, start, nbytes), files.read(part.op.source, start, nbytes)
    width = max(1, part.stored.dtype.bits // 8)
    tally = Tally(compared=nbytes // width)
    if not np.array_equal(stored, source):
        differing = np.flatnonzero(stored != source) // width
        tally.wrong = tally.loosely_wrong = len(np.unique(differing))
        tally.first = part.begin + start // width + int(differing[0])
        tally.moved = True
    return tally
