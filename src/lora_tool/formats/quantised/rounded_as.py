"""Weights rounded to four bits and back, in numpy, a few rows at a time: bit for bit as bitsandbytes 0.50.

`quantize_4bit`, with `quantize_blockwise` for nested scales, and `dequantize_4bit` of the two. The mean of the scales
is summed in float64; torch adds it in float32 in an order of its own, which in all that was compared rounds to the
same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lora_tool.formats.quantised.arrays import F32, STORED, ReadRows
from lora_tool.formats.quantised.encodings import RoundedAs

_OUTER = 256
"""Scales that have one scale, where they are quantised themselves."""
_BLOCK, _ALIGNED = 64, 64 * _OUTER
_AT_ONCE = 64 * _ALIGNED
_LEAST = np.float32(1e-38)
"""What takes the place of a scale of nothing but zeros, by which nothing can be divided."""
_CELLS = 1 << 11


def rounded_as(encoding: RoundedAs, first: int, last: int, read: ReadRows) -> F32:
    """Return rows `first` to `last` of the rounded weight, float32, [rows, columns]."""
    width = encoding.spec.shape[-1]
    begin, end = first * width, last * width
    aligned = begin // _ALIGNED * _ALIGNED
    values = _plain(encoding, aligned, min(-(-end // _ALIGNED) * _ALIGNED, encoding.spec.numel), read)
    scales = _largest(values, _BLOCK)
    made = _as_float32(encoding.levels)[_nearest(values, scales, _BLOCK, encoding.levels)]
    made *= np.repeat(_stored(encoding, scales, read), _BLOCK)[: len(values)]
    return made[begin - aligned : end - aligned].reshape(last - first, width)


def _stored(encoding: RoundedAs, scales: F32, read: ReadRows) -> F32:
    """Return the scales as they are after they were rounded themselves, where they are."""
    if not encoding.nested:
        return scales
    mean, levels = _mean(encoding, read), dynamic_levels()
    codes, outer = _nested(scales, mean, levels)
    return np.asarray(_as_float32(levels)[codes] * np.repeat(outer, _OUTER)[: len(codes)] + mean)


def _plain(encoding: RoundedAs, begin: int, end: int, read: ReadRows) -> F32:
    """Return elements of the plain weight, flat."""
    tensor = encoding.codes
    size = tensor.dtype.bits // 8
    return read(tensor, begin * size, (end - begin) * size).view(STORED[tensor.dtype]).astype(np.float32)


def _mean(encoding: RoundedAs, read: ReadRows) -> np.float32:
    """Return the mean of the scales of all blocks: the whole weight is read once, a part at a time."""
    if encoding.means.decoded is None:
        size = encoding.spec.numel
        parts = (
            _largest(_plain(encoding, at, min(at + _AT_ONCE, size), read), _BLOCK) for at in range(0, size, _AT_ONCE)
        )
        total = math.fsum(float(part.sum(dtype=np.float64)) for part in parts)
        encoding.means.decoded = total / -(-size // _BLOCK)
    return np.float32(encoding.means.decoded)


@cache
def _as_float32(levels: tuple[float, ...]) -> F32:
    return np.array(levels, np.float32)


@cache
def dynamic_levels() -> tuple[float, ...]:
    """Return the levels of eight bits: bitsandbytes' `create_dynamic_map`.

    Seven decades, of 1 to 64 levels each, and their negatives, 0 and 1.
    """
    sizes = [size for decade in range(7) for size in _decade(decade)]
    return tuple(sorted([*sizes, *(-size for size in sizes), 0.0, 1.0]))


def _decade(number: int) -> Iterator[float]:
    # as torch's linspace: from both ends to the middle, with one rounding for product and sum
    count = 2**number + 1
    at, step = np.arange(count), float((np.float32(1) - np.float32(0.1)) / np.float32(count - 1))
    edges = np.where(at < count // 2, float(np.float32(0.1)) + step * at, 1 - step * (count - 1 - at)).astype(
        np.float32
    )
    means = (edges[:-1] + edges[1:]) / np.float32(2)
    yield from (np.float32(10.0 ** (number - 6)) * means).tolist()


def _largest(values: F32, block: int) -> F32:
    """Return the largest size in each block of flat values; the last block may be shorter."""
    sizes = np.abs(values)
    full = len(sizes) // block * block
    found = sizes[:full].reshape(-1, block).max(axis=1) if full else np.empty(0, np.float32)
    return found if full == len(sizes) else np.append(found, sizes[full:].max())


def _nearest(values: F32, scales: F32, block: int, levels: tuple[float, ...]) -> NDArray[np.uint8]:
    """Return which of the ascending `levels` of -1 to 1 each value is nearest to, divided by the scale of its block."""
    full = len(values) // block * block
    inverse = np.float32(1) / np.maximum(scales, _LEAST)
    scaled = np.empty(len(values), np.float32)
    np.multiply(values[:full].reshape(-1, block), inverse[: full // block, None], out=scaled[:full].reshape(-1, block))
    if full < len(values):  # the last block, where it is not full, is divided
        np.divide(values[full:], np.maximum(scales[-1], _LEAST), out=scaled[full:])
    np.fmax(np.fmin(scaled, 1, out=scaled), -1, out=scaled)  # unlike clip, they make a number of NaN
    below, bound = _cells(levels)
    cell = _cell(scaled)
    return np.asarray(below.take(cell) + (scaled > bound.take(cell)), np.uint8)


def _nested(scales: F32, mean: np.float32, levels: tuple[float, ...]) -> tuple[NDArray[np.uint8], F32]:
    """Return the codes of scales less their mean, and the scale of each `_OUTER` of them: of whole ones, but for the last.

    Each takes the nearest level, as on a GPU.
    """
    moved = scales - mean
    outer = _largest(moved, _OUTER)
    spread = np.repeat(outer, _OUTER)[: len(moved)]
    scaled: F32 = np.clip(moved * (np.float32(1) / np.maximum(spread, _LEAST)), -1, 1)
    return np.searchsorted(_midpoints(levels), scaled).astype(np.uint8), outer


@cache
def _midpoints(levels: tuple[float, ...]) -> F32:
    """Return the midpoints of neighbouring levels."""
    values = np.array(levels, np.float32)
    return np.asarray((values[1:] + values[:-1]) / np.float32(2))


def _cell(scaled: F32) -> NDArray[np.int16]:
    """Return the cell of -1 to 1 in which each value lies: a larger value is never in an earlier one."""
    return ((scaled + np.float32(1)) * np.float32(_CELLS / 2)).astype(np.int16)


@cache
def _cells(levels: tuple[float, ...]) -> tuple[NDArray[np.uint8], F32]:
    """Return for each cell how many midpoints lie before it, and the one in it: looking up is faster than searching."""
    bounds = _midpoints(levels)
    at = _cell(bounds)
    if len(set(at.tolist())) < len(at):
        raise AssertionError("two midpoints are in one cell")
    below = np.searchsorted(at, np.arange(_CELLS + 1)).astype(np.uint8)
    bound = np.full(_CELLS + 1, np.inf, np.float32)
    bound[at] = bounds
    return below, bound
