"""Counting over blocks: how many values are wrong, how far off they are, and how much of ΔW is in the change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lora_tool.core.tensors import DType
from lora_tool.native.library import COMPARABLE, COMPARED, any_kernel
from lora_tool.verification.bounds import Bound
from lora_tool.verification.elements import Array, Bytes, decode, half_ulps
from lora_tool.verification.recompute import Recomputed
from lora_tool.verification.tally import Tally

_EIGHT = 8
"""Elements that the kernel compares together."""


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
        ~kept & ~(off <= bound.of_result * half + bound.of_change * change + bound.of_product * products + room)
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
