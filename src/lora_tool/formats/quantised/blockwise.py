"""Numbers made codes of a few bits by bitsandbytes' quantisers, in numpy: bit for bit what version 0.50 computes on a CPU.

`quantize_4bit`, with `quantize_blockwise` for scales that are quantised themselves, and `int8_vectorwise_quant`. A
block of values, over the flattened weight, is divided by its largest size, and each takes the nearest of the levels.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from lora_tool.formats.quantised.arrays import F32, Array

OUTER = 256
"""Scales that have one scale, where they are quantised themselves."""
LEAST = np.float32(1e-38)
"""What takes the place of a scale of nothing but zeros, by which nothing can be divided."""
_CELLS = 1 << 11
_MOST = np.float32(127)
_TABLE = np.float32(65535)
_LANES = 32
"""Sums that torch adds to side by side: four vectors of 256 bits."""
_LEVELS = 4


def largest(values: F32, block: int) -> F32:
    """Return the largest size in each block of flat values; the last block may be shorter."""
    sizes = np.abs(values)
    full = len(sizes) // block * block
    found = sizes[:full].reshape(-1, block).max(axis=1) if full else np.empty(0, np.float32)
    return found if full == len(sizes) else np.append(found, sizes[full:].max())


def nearest(values: F32, scales: F32, block: int, levels: tuple[float, ...]) -> NDArray[np.uint8]:
    """Return which of the ascending `levels` of -1 to 1 each value is nearest to, divided by the scale of its block."""
    full = len(values) // block * block
    inverse = np.float32(1) / np.maximum(scales, LEAST)
    scaled = np.empty(len(values), np.float32)
    np.multiply(values[:full].reshape(-1, block), inverse[: full // block, None], out=scaled[:full].reshape(-1, block))
    if full < len(values):  # the last block, where it is not full, is divided
        np.divide(values[full:], np.maximum(scales[-1], LEAST), out=scaled[full:])
    np.fmax(np.fmin(scaled, 1, out=scaled), -1, out=scaled)  # unlike clip, they make a number of NaN
    below, bound = _cells(levels)
    cell = _cell(scaled)
    return np.asarray(below.take(cell) + (scaled > bound.take(cell)), np.uint8)


def nested(
    scales: F32, mean: np.float32, levels: tuple[float, ...], *, from_table: bool = False
) -> tuple[NDArray[np.uint8], F32]:
    """Return the codes of scales less their mean, and the scale of each `OUTER` of them: of whole ones, but for the last.

    On a GPU each takes the nearest level. On a CPU (`from_table`) it takes that of the nearest of 2^16 numbers, for
    which bitsandbytes has a table.
    """
    moved = scales - mean
    outer = largest(moved, OUTER)
    spread = np.repeat(outer, OUTER)[: len(moved)]
    scaled: F32 = np.clip(moved * (np.float32(1) / np.maximum(spread, LEAST)), -1, 1)
    if from_table:
        place = ((scaled + np.float32(1)) * np.float32(0.5) * _TABLE + np.float32(0.5)).astype(np.int32)
        place[spread == 0] = 0  # 0 / 0 there
        scaled = np.asarray(place.astype(np.float32) / _TABLE * np.float32(2) - np.float32(1))
    return np.searchsorted(midpoints(levels), scaled).astype(np.uint8), outer


def int8_rows(values: Array, largest_of_rows: F32) -> NDArray[np.int8]:
    """Return the codes of float16 rows, [rows, columns], whose largest sizes are these; those of zeros are 0."""
    # 127 / x is, in torch, 127 times what is inverse to x
    factor = _MOST * (np.float32(1) / np.where(largest_of_rows == 0, np.float32(1), largest_of_rows))
    return np.rint(values.astype(np.float32) * factor[:, None]).astype(np.int8)


def mean_in_order(values: F32) -> np.float32:
    """Return the mean that torch gives for a float32 vector, on one thread of a CPU: its sums, in its order.

    Other machines and other numbers of threads add in other orders, and differ in the last place.
    """
    rows = values[: len(values) // _LANES * _LANES].reshape(-1, _LANES)
    sums = _cascade(rows)
    rest = values[rows.size :]
    vectors = rest[: len(rest) // 8 * 8].reshape(-1, 8)
    lanes = sums.reshape(4, 8)
    first = lanes[0]
    for vector in vectors:
        first = first + vector
    for lane in lanes[1:]:
        first = first + lane
    total = np.float32(0)
    for value in (*rest[vectors.size :], *first):
        total = total + value
    return np.float32(total / np.float32(len(values)))


def _cascade(rows: F32) -> F32:
    """Return the sum of rows, added up in groups, groups of groups and so on: torch's `multi_row_sum`."""
    count = len(rows)
    power = max(_LEVELS, (max(count - 1, 0)).bit_length() // _LEVELS)
    step = 1 << power
    sums: list[F32] = [np.zeros(rows.shape[1], np.float32) for _ in range(_LEVELS)]
    done = 0
    while done + step <= count:
        for row in rows[done : done + step]:
            sums[0] += row
        done += step
        for level in range(1, _LEVELS):
            sums[level] += sums[level - 1]
            sums[level - 1][:] = 0
            if done & ((step - 1) << (level * power)):
                break
    for row in rows[done:]:
        sums[0] += row
    for more in sums[1:]:
        sums[0] += more
    return sums[0]


@cache
def midpoints(levels: tuple[float, ...]) -> F32:
    """Return what lies in the middle between neighbouring levels."""
    values = np.array(levels, np.float32)
    return np.asarray((values[1:] + values[:-1]) / np.float32(2))


def _cell(scaled: F32) -> NDArray[np.int16]:
    """Return the cell of -1 to 1 in which each value lies: a larger value is never in an earlier one."""
    return ((scaled + np.float32(1)) * np.float32(_CELLS / 2)).astype(np.int16)


@cache
def _cells(levels: tuple[float, ...]) -> tuple[NDArray[np.uint8], F32]:
    """Return for each cell how many midpoints lie before it, and the one in it: looking up is faster than searching."""
    bounds = midpoints(levels)
    at = _cell(bounds)
    if len(set(at.tolist())) < len(at):
        raise AssertionError("two midpoints are in one cell")
    below = np.searchsorted(at, np.arange(_CELLS + 1)).astype(np.uint8)
    bound = np.full(_CELLS + 1, np.inf, np.float32)
    bound[at] = bounds
    return below, bound
