"""What bitsandbytes makes of a plain weight, by a second formula: each value finds its block and counts the levels below it.

Nothing here is shared with what computes for the writer. A code is how many midpoints between levels are smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import RoundedAs

_Array = NDArray[Any]
_Read = Callable[[StoredTensor, int, int], NDArray[np.uint8]]
_PER_SCALE, _PER_OUTER = 64, 256
_PART = 1 << 20


def rounded_again(encoding: RoundedAs, at: _Array, read: _Read) -> _Array:
    """Return the rounded values at these places of the flattened weight, one after the other, float64."""
    low, high = int(at.min()), int(at.max()) + 1
    first = low // (_PER_SCALE * _PER_OUTER) * _PER_OUTER if encoding.nested else low // _PER_SCALE
    sizes = encoding.spec.numel
    end = -(-high // _PER_SCALE)
    if encoding.nested:
        end = -(-end // _PER_OUTER) * _PER_OUTER
    values = _values(encoding.codes, first * _PER_SCALE, min(end * _PER_SCALE, sizes), read)
    scales = _scales(values)
    block = np.arange(len(values)) // _PER_SCALE
    by = np.maximum(scales, np.float32(1e-38))
    scaled = values * (np.float32(1) / by)[block]
    if len(values) % _PER_SCALE:
        rest = len(values) // _PER_SCALE * _PER_SCALE
        scaled[rest:] = values[rest:] / by[-1]
    levels = np.array(encoding.levels, np.float32)
    if encoding.nested:
        scales = _eight_bits(scales, _mean(encoding, read))
    found = levels[_below(np.clip(scaled, -1, 1), levels)].astype(np.float64) * scales[block]
    return np.asarray(found[at - first * _PER_SCALE])


def _values(tensor: StoredTensor, begin: int, end: int, read: _Read) -> _Array:
    size = tensor.dtype.bits // 8
    raw = read(tensor, begin * size, (end - begin) * size)
    if tensor.dtype is DType.BF16:
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view(f"<f{size}").astype("<f4")


def _scales(values: _Array) -> _Array:
    """Return the largest size of each block."""
    return np.maximum.reduceat(np.abs(values), np.arange(0, len(values), _PER_SCALE))


def _below(scaled: _Array, levels: _Array) -> _Array:
    """Return for each value how many midpoints between neighbouring levels are smaller."""
    codes = np.zeros(scaled.shape, np.intp)
    for one, other in itertools.pairwise(levels):
        codes += scaled > np.float32((one + other) / np.float32(2))
    return codes


def _mean(encoding: RoundedAs, read: _Read) -> np.float32:
    if encoding.means.verified is None:
        size, total = encoding.spec.numel, 0.0
        for begin in range(0, size, _PART):
            total += float(
                _scales(_values(encoding.codes, begin, min(begin + _PART, size), read)).astype(np.float64).sum()
            )
        encoding.means.verified = total / -(-size // _PER_SCALE)
    return np.float32(encoding.means.verified)


def _eight_bits(scales: _Array, mean: np.float32) -> _Array:
    """Return scales rounded to the levels of eight bits, less their mean, by the largest of 256."""
    moved = (scales - mean).astype(np.float32)
    levels = _dynamic_levels()
    for begin in range(0, len(moved), _PER_OUTER):
        part = moved[begin : begin + _PER_OUTER]
        outer = np.abs(part).max()
        scaled = np.clip(part * (np.float32(1) / max(outer, np.float32(1e-38))), -1, 1)
        part[...] = levels[_below(scaled, levels)] * outer
    return np.asarray(moved + mean)


def _dynamic_levels() -> _Array:
    """Return 127 sizes, the middles of 1, 2, 4 … 64 equal parts of 0.1 to 1, a tenth as large for each fewer; ±, 0 and 1."""
    found = [0.0, 1.0]
    low = np.float32(0.1)
    for power in range(7):
        parts = 2**power
        step = np.float64(np.float32((np.float32(1) - low) / np.float32(parts)))
        edges = [
            np.float64(low) + step * n if n < (parts + 1) // 2 else 1 - step * (parts - n) for n in range(parts + 1)
        ]
        for one, other in itertools.pairwise(edges):
            size = np.float32(10.0 ** (power - 6)) * ((np.float32(one) + np.float32(other)) / np.float32(2))
            found += [float(size), -float(size)]
    return np.array(sorted(found), np.float32)
