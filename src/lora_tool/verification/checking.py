"""Comparing the tensors of a folder with the plan that should have made them, in parallel and in bounded memory."""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct
from threadpoolctl import threadpool_limits

from lora_tool.choices import Choice
from lora_tool.float_mode import ieee_arithmetic
from lora_tool.machine import available_cores
from lora_tool.plan.core.factor_ops import Mix
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.quantise import Quantise
from lora_tool.plan.core.requantise import Requantise
from lora_tool.plan.core.steps import Step
from lora_tool.progress import Progress
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.tensors import TensorTable
from lora_tool.verification.bounds import sixteen_bit_bound, stated_bound, working_type
from lora_tool.verification.elements import Files, Rows, rows_and_columns, some_rows
from lora_tool.verification.initial import CannotTellError
from lora_tool.verification.pieces import (
    Compared,
    batched,
    parts_of,
    row_blocks,
    sampled_columns,
    sampled_rows,
    sampled_stretches,
    stretches,
)
from lora_tool.verification.recompute import Recomputer, why_not
from lora_tool.verification.tally import Tally, tally_of
from lora_tool.verification.verdicts import evidence_of

_TASK_PIECES = 16
"""Blocks or stretches per task: enough that handing it out costs nothing."""


@enum.unique
class Level(Choice):
    """How much is read."""

    SAMPLE = "sample"
    """Rows of what was changed and pieces of what was copied, from everywhere: a small part of the merge's time."""
    FULL = "full"
    """Every value of every tensor."""


class _Task(Struct, frozen=True, kw_only=True):
    """Some of the comparison of a part: ranges of rows or columns to recompute, or stretches of bytes."""

    part: Compared
    rows: Sequence[Rows] = ()
    columns: Sequence[int] = ()
    stretches: Sequence[tuple[int, int]] = ()


def check_steps(
    steps: Iterable[Step],
    tensors: TensorTable,
    *,
    level: Level,
    precision: Precision | None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TensorEvidence]:
    """Return the evidence of every planned tensor that `tensors` has with the planned shape.

    `precision` is the arithmetic that made them, None where that is not known: then what 16-bit arithmetic explains is
    right, too. Raises `SourceChanged` or OSError where a file cannot be read to its end.
    """
    seen = [
        (step, [(part, Tally()) for part in parts]) for step in steps if (parts := _parts(step, tensors)) is not None
    ]
    with Files() as files, ieee_arithmetic(), threadpool_limits(limits=1, user_api="blas"):
        looks = ((task, tally) for _, parts in seen for part, tally in parts for task in _tasks(part, level))
        _in_parallel(looks, files, precision, jobs, progress or (lambda _: None))
        return {step.out.name: evidence_of(step, parts, files) for step, parts in seen}


def _parts(step: Step, tensors: TensorTable) -> tuple[Compared, ...] | None:
    """Return what is compared of a step's output; None where it is not there as it was planned, which rules say."""
    stored = tensors.get(step.out.name)
    if stored is None or stored.shape != step.out.shape or stored.dtype.is_float != step.out.dtype.is_float:
        return None
    if isinstance(step.op, Requantise | Quantise):
        from lora_tool.verification.coded import coded_parts  # noqa: PLC0415 - for quantised weights alone

        return coded_parts(step.op, stored, tensors)
    return parts_of(step, stored)


def _tasks(part: Compared, level: Level) -> Iterator[_Task]:
    if isinstance(part.op, Requantise | Quantise):
        from lora_tool.verification.coded import coded_rows  # noqa: PLC0415 - for quantised weights alone

        for tiles in batched(coded_rows(part, all_of_them=level is Level.FULL), _TASK_PIECES):
            yield _Task(part=part, rows=tiles)
    elif part.copied or (why_not(part.op) is not None and part.of_one_size):
        found = stretches(part.stored) if level is Level.FULL else sampled_stretches(part.stored)
        for some in batched(list(found), _TASK_PIECES):
            yield _Task(part=part, stretches=some)
    elif level is Level.SAMPLE and (columns := sampled_columns(part.stored, part.op)):
        yield _Task(part=part, columns=columns)
    elif why_not(part.op) is None and part.stored.spec.numel:
        rows = list(row_blocks(part.stored) if level is Level.FULL else sampled_rows(part.stored, part.op))
        # once, not once per task: the norms of DoRA on a weight stored [in, out] take a pass over all of it, and an
        # init is a decomposition of all of it
        for blocks in [rows] if part.op.needs_all_rows else batched(rows, _TASK_PIECES):
            yield _Task(part=part, rows=blocks)


def _in_parallel(
    looks: Iterable[tuple[_Task, Tally]],
    files: Files,
    precision: Precision | None,
    jobs: int | None,
    progress: Progress,
) -> None:
    """Carry out every task and add what it saw to its tally."""
    stop = threading.Event()
    local = threading.local()

    @ieee_arithmetic()  # a subnormal weight taken for zero would be found wrong
    def run(task: _Task) -> Tally:
        if not hasattr(local, "recomputer"):
            local.recomputer = Recomputer(files)
        tally = Tally()
        try:
            for block in _blocks_of(task, files, local.recomputer, precision):
                tally.add(block)
                if stop.is_set():
                    break
                progress(block.compared * task.part.stored.dtype.bits // 8)
        except CannotTellError as why:
            return _unknown(task.part, files, str(why))
        return tally

    with ThreadPoolExecutor(jobs or available_cores()) as workers:
        try:
            for future, tally in [(workers.submit(run, task), tally) for task, tally in looks]:
                tally.add(future.result())
        except BaseException:
            stop.set()
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def _blocks_of(task: _Task, files: Files, recomputer: Recomputer, precision: Precision | None) -> Iterator[Tally]:
    part = task.part
    if not task.rows:
        yield from _at_once(task, files, recomputer, precision)
        return
    if isinstance(part.op, Requantise | Quantise):
        from lora_tool.verification.coded import coded_tallies  # noqa: PLC0415 - for quantised weights alone

        yield from coded_tallies(part, task.rows, files, recomputer, precision)
        return
    dtype = part.stored.dtype
    if part.op.taken_out and part.op.source.dtype is not dtype:
        raise CannotTellError(
            f"{part.op.taken_out} was taken out of the base in {dtype}, but the base is {part.op.source.dtype}"
        )
    wide = working_type(part.op, dtype)
    bounds = [stated_bound(part.op, dtype, precision or Precision.FLOAT32)]
    if precision is None:
        bounds.append(sixteen_bit_bound(part.op, dtype))
    if part.written is not None:
        from lora_tool.verification.requantised import half_steps, step_bound  # noqa: PLC0415 - for quantised weights alone

        bounds = [step_bound(bound) for bound in bounds]
    width = rows_and_columns(part.stored.shape)[1]
    for rows in task.rows:
        with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
            stored, at = files.rows(part.stored, rows), 0
            for some, expected in recomputer.blocks(part.op, rows, wide):
                inside = slice(at, at := at + len(expected.base))
                steps = None if part.written is None else half_steps(part, some, files)
                own = some_rows(stored, inside, dtype, width)
                tally = tally_of(own, dtype, expected, bounds, wide, steps)
                if tally.first is not None:
                    tally.first = part.begin + _flat(tally.first, some, width)
                yield tally


def _at_once(task: _Task, files: Files, recomputer: Recomputer, precision: Precision | None) -> Iterator[Tally]:
    yield from _compare_bytes(task.part, files, task.stretches)
    if task.columns:
        yield _compare_columns(task.part, task.columns, files, recomputer, precision)


def _compare_columns(
    part: Compared, columns: Sequence[int], files: Files, recomputer: Recomputer, precision: Precision | None
) -> Tally:
    """Compare all rows of some columns of a product with a small matrix."""
    op, dtype, chosen = part.op, part.stored.dtype, np.array(columns)
    if not isinstance(op, Mix):
        raise AssertionError("columns are sampled of products with a small matrix alone")  # noqa: TRY004 - ours
    wide = working_type(op, dtype)
    bounds = [stated_bound(op, dtype, precision or Precision.FLOAT32)]
    with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
        expected = recomputer.columns(op, chosen, wide)
        tally = tally_of(files.columns(part.stored, chosen), dtype, expected, bounds, wide)
    if tally.first is not None:
        row, at = divmod(tally.first, len(columns))
        tally.first = part.begin + row * part.stored.shape[1] + columns[at]
    return tally


def _unknown(part: Compared, files: Files, why: str) -> Tally:
    """Return that nothing is known of the part but whether it is still its source."""
    tally = Tally(unknown=why)
    for some in _compare_bytes(part, files, list(stretches(part.stored)) if part.of_one_size else ()):
        tally.add(some)
    return tally


def _flat(at: int, rows: Rows, width: int) -> int:
    """Return the flat index in the part of value `at` of a block of rows."""
    row, column = divmod(at, width)
    numbers = itertools.chain.from_iterable(range(first, last) for first, last in rows)
    return next(itertools.islice(numbers, row, None)) * width + column


def _compare_bytes(part: Compared, files: Files, stretches: Sequence[tuple[int, int]]) -> Iterator[Tally]:
    """Compare stretches of a copied tensor byte by byte."""
    width = max(1, part.stored.dtype.bits // 8)
    both = (files.stretches(tensor, stretches) for tensor in (part.stored, part.op.source))
    for (start, nbytes), stored, source in zip(stretches, *both, strict=True):
        tally = Tally(compared=nbytes // width)
        if not np.array_equal(stored, source):
            differing = np.flatnonzero(stored != source) // width
            tally.outside = tally.wrong = len(np.unique(differing))
            tally.first = part.begin + start // width + int(differing[0])
            tally.moved = True
        yield tally
