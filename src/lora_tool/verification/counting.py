"""Comparing rows and columns, block by block, with what the second formula gives for them: how many values are wrong, how
far off they are, and how much of ΔW is in the change.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from threadpoolctl import threadpool_limits

from lora_tool.core.tensors import DType
from lora_tool.native.library import COMPARABLE, COMPARED, any_kernel
from lora_tool.plans.core.factor_ops import Mix
from lora_tool.plans.core.ops import Precision, RowOp
from lora_tool.plans.core.requantise import Requantise
from lora_tool.verification.bounds import Bound, sixteen_bit_bound, stated_bound, working_type
from lora_tool.verification.elements import Array, Bytes, Files, decode, half_ulps, some_rows
from lora_tool.verification.pieces import CannotTellError, Compared, Rows, Tally, rows_and_columns
from lora_tool.verification.recompute import Recomputed, Recomputer

_EIGHT = 8
"""Elements that the kernel compares together."""


@contextlib.contextmanager
def recomputing(precision: Precision | None) -> Iterator[Recomputing]:
    """Yield what recomputes tensors of this arithmetic; BLAS has one thread meanwhile."""
    with Files() as files, threadpool_limits(limits=1, user_api="blas"):
        yield Recomputing(files, precision)


class Recomputing(Struct, frozen=True):
    """What recomputes, and the files that it reads. Safe for threads."""

    files: Files
    precision: Precision | None
    """The arithmetic that made the tensors, None where that is not known."""
    local: threading.local = field(default_factory=threading.local)

    def tallies(self, part: Compared, rows: Sequence[Rows], columns: Sequence[int]) -> Iterator[Tally]:
        """Yield the tally of the rows of a part, some at a time, and of its columns. Raises `CannotTellError`."""
        if columns:
            yield self._of_columns(part, columns)
        if isinstance(part.op, Requantise):
            from lora_tool.verification.requantised import scale_tally  # only for quantised weights

            for [(first, last)] in rows:
                with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
                    yield scale_tally(part, first, last, self.files)
        elif rows:
            yield from self._of_rows(part, part.op, rows)

    @property
    def _recomputer(self) -> Recomputer:
        """This thread's own."""
        if not hasattr(self.local, "recomputer"):
            self.local.recomputer = Recomputer(self.files)
        recomputer: Recomputer = self.local.recomputer
        return recomputer

    def _of_rows(self, part: Compared, op: RowOp, ranges: Sequence[Rows]) -> Iterator[Tally]:
        dtype = part.stored.dtype
        if op.taken_out and op.source.dtype is not dtype:
            raise CannotTellError(
                f"{op.taken_out} was taken out of the base in {dtype}, but the base is {op.source.dtype}"
            )
        wide = working_type(op, dtype)
        bounds = [stated_bound(op, dtype, self.precision or Precision.FLOAT32)]
        if self.precision is None:
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
                stored, at = self.files.rows(part.stored, rows, place="stored"), 0
                for some, expected in self._recomputer.blocks(op, rows, wide):
                    inside = slice(at, at := at + len(expected.base))
                    steps = None if part.written is None else half_steps(part, some, self.files)
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
        bounds = [stated_bound(op, dtype, self.precision or Precision.FLOAT32)]
        with np.errstate(all="ignore"):  # NaN and infinity are counted as wrong
            expected = self._recomputer.columns(op, chosen, wide)
            tally = tally_of(self.files.columns(part.stored, chosen), dtype, expected, bounds, wide)
        if tally.first is not None:
            row, at = divmod(tally.first, len(columns))
            tally.first = part.begin + row * part.stored.shape[1] + columns[at]
        return tally


def _flat(at: int, rows: Rows, width: int) -> int:
    """Return the flat index in the part of value `at` of a block of rows."""
    row, column = divmod(at, width)
    numbers = itertools.chain.from_iterable(range(first, last) for first, last in rows)
    return next(itertools.islice(numbers, row, None)) * width + column


# Counting over a block.


def tally_of(
    stored: Bytes,
    dtype: DType,
    expected: Recomputed,
    bounds: Sequence[Bound],
    wide: np.dtype[Any],
    steps: Array | None = None,
) -> Tally:
    """Return the tally of one block: `stored` are its bytes in the merged model, `first` counts from its beginning.

    `bounds` is the stated one, and a wider one that may explain the values too where the arithmetic is not known;
    `wide` is the type to compare in. `steps` is half the distance to the next value that could be stored, by default
    that of `dtype`.
    """
    within = float(wide.type(bounds[0].of_result))
    seen = _seen_by_kernel(stored, dtype, expected, within, wide) if steps is None else None
    if seen is None:
        tally, ratio = _seen_by_numpy(stored, dtype, expected.widened(wide), steps)
        places = _beyond(ratio, within, tally)
    else:
        tally, places = seen
    if places.size:
        _look_closer(tally, places, stored, dtype, expected, bounds, wide, steps)
    return tally


def _beyond(ratio: Array, within: float, tally: Tally) -> Array:
    """Return where a ratio is beyond the bound, which NaN is; the tally is given the largest of the others."""
    largest, places = ratio.max(initial=0.0), np.empty(0, np.intp)
    if not largest <= within:
        places = np.flatnonzero(~(ratio <= within))
        ratio.reshape(-1)[places] = 0
        largest = ratio.max()
    tally.ulps = max(tally.ulps, float(largest) / 2)
    return places


def _seen_by_kernel(
    stored: Bytes, dtype: DType, expected: Recomputed, within: float, wide: np.dtype[Any]
) -> tuple[Tally, Array] | None:
    """Return the tally, and where values are beyond the bound; None where the kernel cannot, and where nothing moved,
    which squares may hide.
    """
    size, base = expected.base.size, expected.stored_as
    if dtype not in COMPARABLE or base not in COMPARABLE or size % _EIGHT or (found := any_kernel()) is None:
        return None
    change, largest = np.ascontiguousarray(expected.change), np.empty(-(-size // COMPARED), np.float32)
    elements = stored.ctypes.data, expected.base.ctypes.data
    error, changed, moved, dot = found.compare(elements, (dtype, base), change.ctypes.data, size, largest.ctypes.data)
    if not moved:
        return None
    tally = Tally(compared=size, moved=True, error_squares=error, change_squares=changed, moved_squares=moved, dot=dot)
    parts = _beyond(largest, within, tally)
    if not parts.size:
        return tally, parts
    places = (parts[:, None] * COMPARED + np.arange(COMPARED)).reshape(-1)
    places = places[places < size]
    chosen = expected.part(*np.divmod(places, expected.base.shape[1])).widened(wide)
    _, ratio = _seen_by_numpy(_elements(stored, dtype, places), dtype, chosen, None)
    return tally, places[_beyond(ratio, within, tally)]


def _elements(stored: Bytes, dtype: DType, places: Array) -> Bytes:
    return stored.view(f"V{dtype.bits // 8}")[places].view(np.uint8)


def _seen_by_numpy(stored: Bytes, dtype: DType, expected: Recomputed, steps: Array | None) -> tuple[Tally, Array]:
    """Return the sums over all values, and the error of each value in half ulps."""
    values = decode(stored, dtype, expected.base.dtype).reshape(expected.base.shape)
    steps = half_ulps(values, dtype) if steps is None else steps
    moved = np.subtract(values, expected.base, out=values)  # in memory that is in the cache
    error = moved - expected.change
    moved_squares = _dot(moved, moved)
    tally = Tally(
        compared=error.size,
        moved=moved_squares != 0 or bool(moved.any()),
        error_squares=_dot(error, error),
        change_squares=_dot(expected.change, expected.change),
        moved_squares=moved_squares,
        dot=_dot(moved, expected.change),
    )
    np.abs(error, out=error)
    error /= steps
    return tally, error


def _look_closer(
    tally: Tally,
    places: Array,
    stored: Bytes,
    dtype: DType,
    expected: Recomputed,
    bounds: Sequence[Bound],
    wide: np.dtype[Any],
    steps: Array | None,
) -> None:
    """Count the values outside the bounds, of those at `places`, each with its own size of change and product."""
    rows, columns = np.divmod(places, expected.base.shape[1])
    found = decode(_elements(stored, dtype, places), dtype, wide)
    chosen = expected.part(rows, columns).widened(wide)
    off = np.abs(found - chosen.base - chosen.change)
    both_nan = np.isnan(found) & np.isnan(chosen.base)
    kept = (chosen.change == 0) & (both_nan | (found == chosen.base))  # a NaN or infinity that the base has
    off[kept] = 0
    apart = half_ulps(found, dtype) if steps is None else steps[rows, columns]
    half = off / (off / apart)  # NaN, which is within no bound, where a value is not finite
    base, change = np.abs(chosen.base), np.abs(chosen.change)
    products = expected.products(rows, columns)
    room = expected.room(rows, columns) if expected.room is not None else 0.0
    outside = [
        ~kept
        & ~(
            off
            <= bound.of_result * half
            + bound.of_value * np.abs(found)
            + bound.of_change * change
            + bound.of_product * products
            + room
        )
        for bound in bounds
    ]
    tally.outside, tally.wrong = int(np.count_nonzero(outside[0])), int(np.count_nonzero(outside[-1]))
    if tally.outside:
        tally.first = int(places[outside[0]][0])
    # where what was added cancels, the neighbours of the small result are near; the size of what was added decides
    largest = np.maximum(np.maximum(np.abs(found), base), products)
    apart = np.maximum(half, half * largest / np.maximum(np.abs(found), np.finfo(half.dtype).tiny))
    tally.ulps = float(np.maximum(tally.ulps, np.max(off / apart, initial=0.0, where=~kept) / 2))


def _dot(a: Array, b: Array) -> float:
    return float(np.dot(a.reshape(-1), b.reshape(-1)))
