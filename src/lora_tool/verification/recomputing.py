"""Comparing rows and columns with what the second formula gives for them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import threadpool_limits

from lora_tool.plans.core.factor_ops import Mix
from lora_tool.plans.core.ops import Precision, RowOp
from lora_tool.plans.core.requantise import Requantise
from lora_tool.verification.bounds import sixteen_bit_bound, stated_bound, working_type
from lora_tool.verification.counting import tally_of
from lora_tool.verification.elements import Files, some_rows
from lora_tool.verification.pieces import Compared, Rows, rows_and_columns
from lora_tool.verification.recompute import Recomputer
from lora_tool.verification.tally import CannotTellError, Tally

if TYPE_CHECKING:
    from typing_extensions import Self


class Recomputing:
    """What recomputes, and the files that it reads: BLAS has one thread meanwhile. A context manager, safe for threads.

    `precision` is the arithmetic that made the tensors, None where that is not known.
    """

    def __init__(self, precision: Precision | None) -> None:
        self._precision = precision
        self._files = Files()
        self._local = threading.local()
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._inside.enter_context(self._files)
        self._inside.enter_context(threadpool_limits(limits=1, user_api="blas"))
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    def tallies(self, part: Compared, rows: Sequence[Rows], columns: Sequence[int]) -> Iterator[Tally]:
        """Yield the tally of the rows of a part, some at a time, and of its columns. Raises `CannotTellError`."""
        if columns:
            yield self._of_columns(part, columns)
        if isinstance(part.op, Requantise):
            from lora_tool.verification.requantised import scale_tally  # only for quantised weights

            for [(first, last)] in rows:
                with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
                    yield scale_tally(part, first, last, self._files)
        elif rows:
            yield from self._of_rows(part, part.op, rows)

    @property
    def _recomputer(self) -> Recomputer:
        """This thread's own."""
        if not hasattr(self._local, "recomputer"):
            self._local.recomputer = Recomputer(self._files)
        recomputer: Recomputer = self._local.recomputer
        return recomputer

    def _of_rows(self, part: Compared, op: RowOp, ranges: Sequence[Rows]) -> Iterator[Tally]:
        dtype = part.stored.dtype
        if op.taken_out and op.source.dtype is not dtype:
            raise CannotTellError(
                f"{op.taken_out} was taken out of the base in {dtype}, but the base is {op.source.dtype}"
            )
        wide = working_type(op, dtype)
        bounds = [stated_bound(op, dtype, self._precision or Precision.FLOAT32)]
        if self._precision is None:
            bounds.append(sixteen_bit_bound(op, dtype))
        if part.written is not None:
            from lora_tool.verification.requantised import (  # only for quantised weights
                half_steps,
                step_bound,
            )

            bounds = [step_bound(bound) for bound in bounds]
        width = rows_and_columns(part.stored.shape)[1]
        for rows in ranges:
            with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
                stored, at = self._files.rows(part.stored, rows, place="stored"), 0
                for some, expected in self._recomputer.blocks(op, rows, wide):
                    inside = slice(at, at := at + len(expected.base))
                    steps = None if part.written is None else half_steps(part, some, self._files)
                    own = some_rows(stored, inside, dtype, width)
                    tally = tally_of(own, dtype, expected, bounds, wide, steps)
                    if tally.first is not None:
                        tally.first = part.begin + _flat(tally.first, some, width)
                    yield tally

    def _of_columns(self, part: Compared, columns: Sequence[int]) -> Tally:
        """Compare all rows of some columns of a product with a small matrix."""
        op, dtype, chosen = part.op, part.stored.dtype, np.array(columns)
        if not isinstance(op, Mix):
            raise AssertionError("columns are sampled of products with a small matrix alone")  # noqa: TRY004 - ours
        wide = working_type(op, dtype)
        bounds = [stated_bound(op, dtype, self._precision or Precision.FLOAT32)]
        with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
            expected = self._recomputer.columns(op, chosen, wide)
            tally = tally_of(self._files.columns(part.stored, chosen), dtype, expected, bounds, wide)
        if tally.first is not None:
            row, at = divmod(tally.first, len(columns))
            tally.first = part.begin + row * part.stored.shape[1] + columns[at]
        return tally


def _flat(at: int, rows: Rows, width: int) -> int:
    """Return the flat index in the part of value `at` of a block of rows."""
    row, column = divmod(at, width)
    numbers = itertools.chain.from_iterable(range(first, last) for first, last in rows)
    return next(itertools.islice(numbers, row, None)) * width + column
