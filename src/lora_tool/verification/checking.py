"""Comparing the tensors of a folder with the plan that should have made them, in parallel and in bounded memory."""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from lora_tool.plan.model import Cast, Copy, DoraDelta, Fate, LoraDelta, Op, Plan, Precision, Step
from lora_tool.rules.evidence import TensorEvidence, Verdict
from lora_tool.tensors import StoredTensor, TensorTable
from lora_tool.verification.bounds import sixteen_bit_bound, stated_bound, working_type
from lora_tool.verification.diagnosis import diagnose
from lora_tool.verification.files import Files, Rows, rows_and_columns
from lora_tool.verification.pieces import blocks, sampled_rows, sampled_stretches, stretches
from lora_tool.verification.recompute import Recomputer, why_not
from lora_tool.verification.tally import Tally, compare

Progress = Callable[[int], None]
"""Called with the number of bytes just compared, from any worker."""
_TASK_PARTS = 16
"""Blocks or pieces per task: enough that handing it out costs nothing."""


@enum.unique
class Level(str, enum.Enum):
    """How much is read."""

    SAMPLE = "sample"
    """Rows of what was changed and pieces of what was copied, from everywhere: a small part of the merge's time."""
    FULL = "full"
    """Every value of every tensor."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Part of one tensor's comparison: ranges of rows to recompute, or stretches of bytes to compare."""

    step: Step
    stored: StoredTensor
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
    steps = [(_as_stored(step, tensors[step.out.name]), tensors[step.out.name]) for step in _present(plan, tensors)]
    tallies = {step.out.name: Tally() for step, _ in steps}
    with Files() as files, threadpool_limits(limits=1, user_api="blas"):
        for name, tally in _in_parallel(_tasks(steps, level), files, precision, jobs, progress or (lambda _: None)):
            tallies[name].add(tally)
        return {
            step.out.name: _evidence(step, stored, tallies[step.out.name], precision, files) for step, stored in steps
        }


def _present(plan: Plan, tensors: TensorTable) -> Iterator[Step]:
    for step in plan.steps:
        stored = tensors.get(step.out.name)
        same_kind = stored is not None and stored.dtype.is_float == step.out.dtype.is_float
        if stored is not None and stored.shape == step.out.shape and same_kind:
            yield step


def _as_stored(step: Step, stored: StoredTensor) -> Step:
    """Return the step with the type that the tensor was stored in: a tool may have been asked for another one."""
    if step.out.dtype is stored.dtype:
        return step
    op: Op = Cast(source=step.op.source) if isinstance(step.op, Copy) else step.op
    if isinstance(op, Cast) and op.source.dtype is stored.dtype:
        op = Copy(source=op.source)
    return replace(step, out=replace(step.out, dtype=stored.dtype), op=op)


def _tasks(steps: Sequence[tuple[Step, StoredTensor]], level: Level) -> Iterator[_Task]:
    for step, stored in steps:
        if isinstance(step.op, Copy):
            found = stretches(stored) if level is Level.FULL else sampled_stretches(stored)
            for part in _parts(list(found)):
                yield _Task(step=step, stored=stored, stretches=tuple(part))
        elif why_not(step.op) is None and stored.spec.numel:
            rows = blocks(stored) if level is Level.FULL else sampled_rows(stored, step.op)
            listed = list(rows)
            # the norms of DoRA on a weight stored [in, out] take a pass over all of it: once, not once per task
            alone = isinstance(step.op, DoraDelta) and step.op.transposed
            for group in [listed] if alone else _parts(listed):
                yield _Task(step=step, stored=stored, rows=tuple(group))


def _parts(items: Sequence[Rows] | Sequence[tuple[int, int]]) -> Iterator[Sequence]:  # type: ignore[type-arg]
    for at in range(0, len(items), _TASK_PARTS):
        yield items[at : at + _TASK_PARTS]


def _in_parallel(
    tasks: Iterator[_Task], files: Files, precision: Precision | None, jobs: int | None, progress: Progress
) -> Iterator[tuple[str, Tally]]:
    stop = threading.Event()
    local = threading.local()

    def run(task: _Task) -> Tally:
        if not hasattr(local, "recomputer"):
            local.recomputer = Recomputer(files)
        tally = Tally()
        for part in _run(task, files, local.recomputer, precision):
            tally.add(part)
            if stop.is_set():
                break
            progress(part.compared * task.stored.dtype.bits // 8)
        return tally

    with ThreadPoolExecutor(jobs or _available_cores()) as workers:
        try:
            futures: list[tuple[str, Future[Tally]]] = [
                (task.step.out.name, workers.submit(run, task)) for task in tasks
            ]
            for name, future in futures:
                yield name, future.result()
        except BaseException:
            stop.set()
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(task: _Task, files: Files, recomputer: Recomputer, precision: Precision | None) -> Iterator[Tally]:
    if isinstance(task.step.op, Copy):
        for start, nbytes in task.stretches:
            yield _compare_bytes(task, files, start, nbytes)
        return
    op, dtype = task.step.op, task.stored.dtype
    wide = working_type(op, dtype)
    bound = stated_bound(op, dtype, precision or Precision.FLOAT32)
    loose = None if precision else sixteen_bit_bound(op, dtype)
    width = rows_and_columns(task.stored.shape)[1]
    for rows in task.rows:
        with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
            for part, expected in recomputer.blocks(op, rows, wide):
                stored = files.rows(task.stored, part)
                yield compare(stored, dtype, expected, bound, loose, partial(_flat, rows=part, width=width))


def _flat(at: int, rows: Rows, width: int) -> int:
    """Return the flat index in the tensor of value `at` of a block of rows."""
    row, column = divmod(at, width)
    for first, last in rows:
        if row < last - first:
            return (first + row) * width + column
        row -= last - first
    raise AssertionError("a value of the block is in one of its rows")


def _compare_bytes(task: _Task, files: Files, start: int, nbytes: int) -> Tally:
    """Compare a stretch of a copied tensor byte by byte."""
    stored, source = files.read(task.stored, start, nbytes), files.read(task.step.op.source, start, nbytes)
    width = max(1, task.stored.dtype.bits // 8)
    tally = Tally(compared=nbytes // width)
    if stored.data != source.data:
        differing = np.flatnonzero(stored != source) // width
        tally.wrong = tally.loosely_wrong = len(np.unique(differing))
        tally.moved = True
        tally.first = start // width + int(differing[0])
    return tally


def _evidence(
    step: Step, stored: StoredTensor, tally: Tally, precision: Precision | None, files: Files
) -> TensorEvidence:
    verdict, factor, reason = Verdict.RIGHT, tally.factor, ""
    unknown = None if isinstance(step.op, Copy) else why_not(step.op)
    wrong = tally.wrong if precision else tally.loosely_wrong
    if unknown is not None:
        verdict, reason = Verdict.UNKNOWN, unknown
    elif wrong:
        verdict, found = diagnose(step, stored, tally, files)
        factor = factor if found is None else found
    elif tally.wrong:
        reason = "within what 16-bit arithmetic explains"
    terms = (
        step.op.terms if isinstance(step.op, LoraDelta) else (step.op.term,) if isinstance(step.op, DoraDelta) else ()
    )
    return TensorEvidence(
        name=step.out.name,
        fate=step.fate,
        verdict=verdict,
        compared=tally.compared,
        numel=stored.spec.numel,
        wrong=wrong,
        first=tally.first if wrong else None,
        ulps=None if isinstance(step.op, Copy) else tally.ulps,
        distance=tally.distance,
        factor=factor,
        cosine=tally.cosine,
        unmoved=step.fate is Fate.MERGED and unknown is None and not tally.moved,
        scaling=terms[0].scaling if len(terms) == 1 else None,
        rank=terms[0].a.shape[0] if len(terms) == 1 else None,
        reason=reason,
    )
