"""Weights rounded to four bits and back, in numpy, a few rows at a time: bit for bit what bitsandbytes 0.50 computes.

`quantize_4bit`, with `quantize_blockwise` for nested scales, and `dequantize_4bit` of the two. The mean of the scales
is summed in float64; torch adds it in float32 in an order of its own, which in all that was compared rounds to the
same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np

from lora_tool.formats.quantised.arrays import F32, STORED, Read
from lora_tool.formats.quantised.blockwise import OUTER, largest, nearest, nested
from lora_tool.formats.quantised.encodings import RoundedAs

_BLOCK, _ALIGNED = 64, 64 * OUTER
_AT_ONCE = 64 * _ALIGNED


def rounded_as(encoding: RoundedAs, first: int, last: int, read: Read) -> F32:
    """Return rows `first` to `last` of the rounded weight, float32, [rows, columns]."""
    width = encoding.spec.shape[-1]
    begin, end = first * width, last * width
    aligned = begin // _ALIGNED * _ALIGNED
    values = _plain(encoding, aligned, min(-(-end // _ALIGNED) * _ALIGNED, encoding.spec.numel), read)
    scales = largest(values, _BLOCK)
    made = _as_float32(encoding.levels)[nearest(values, scales, _BLOCK, encoding.levels)]
    made *= np.repeat(_stored(encoding, scales, read), _BLOCK)[: len(values)]
    return made[begin - aligned : end - aligned].reshape(last - first, width)


def _stored(encoding: RoundedAs, scales: F32, read: Read) -> F32:
    """Return the scales as they are after they were rounded themselves, where they are."""
    if not encoding.nested:
        return scales
    mean, levels = _mean(encoding, read), dynamic_levels()
    codes, outer = nested(scales, mean, levels)
    return np.asarray(_as_float32(levels)[codes] * np.repeat(outer, OUTER)[: len(codes)] + mean)


def _plain(encoding: RoundedAs, begin: int, end: int, read: Read) -> F32:
    """Return elements of the plain weight, flat."""
    tensor = encoding.codes
    size = tensor.dtype.bits // 8
    return read(tensor, begin * size, (end - begin) * size).view(STORED[tensor.dtype]).astype(np.float32)


def _mean(encoding: RoundedAs, read: Read) -> np.float32:
    """Return the mean of the scales of all blocks: the whole weight is read once, a part at a time."""
    if encoding.means.decoded is None:
        size = encoding.spec.numel
        parts = (
            largest(_plain(encoding, at, min(at + _AT_ONCE, size), read), _BLOCK) for at in range(0, size, _AT_ONCE)
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
