"""Weights rounded to four bits and back, in numpy, a few rows at a time: bit for bit what bitsandbytes 0.50 computes.

`quantize_4bit`, with `quantize_blockwise` for nested scales, and `dequantize_4bit` of the two. The mean of the scales is
summed in float64; torch adds it in float32 in an order of its own, which in all that was compared rounds to the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import numpy as np

from lora_tool.formats.quantised.arrays import F32, STORED, Read
from lora_tool.formats.quantised.encodings import RoundedAs

_BLOCK, _OUTER = 64, 64 * 256
_LEAST = np.float32(1e-38)
_AT_ONCE = 64 * _OUTER


def rounded_as(encoding: RoundedAs, first: int, last: int, read: Read) -> F32:
    """Return rows `first` to `last` of the rounded weight, float32, [rows, columns]."""
    width = encoding.spec.shape[-1]
    begin, end = first * width, last * width
    aligned = begin // _OUTER * _OUTER
    values = _plain(encoding, aligned, min(-(-end // _OUTER) * _OUTER, encoding.spec.numel), read)
    scales = _largest(values)
    levels, bounds = _levels(encoding.levels)
    made = np.empty(len(values), np.float32)
    full = len(values) // _BLOCK * _BLOCK
    inverse = np.float32(1) / np.maximum(scales, _LEAST)
    scaled = np.clip(values[:full].reshape(-1, _BLOCK) * inverse[: full // _BLOCK, None], -1, 1).reshape(-1)
    stored = _nested(scales, _mean(encoding, read)) if encoding.nested else scales
    spread = np.repeat(stored, _BLOCK)[: len(values)]
    made[:full] = levels[np.searchsorted(bounds, scaled)]
    if full < len(values):  # the last block, where it is not full, is divided
        rest = np.clip(values[full:] / np.maximum(scales[-1], _LEAST), -1, 1)
        made[full:] = levels[np.searchsorted(bounds, rest)]
    return (made * spread)[begin - aligned : end - aligned].reshape(last - first, width)


def _plain(encoding: RoundedAs, begin: int, end: int, read: Read) -> F32:
    """Return elements of the plain weight, flat."""
    tensor = encoding.codes
    size = tensor.dtype.bits // 8
    return read(tensor, begin * size, (end - begin) * size).view(STORED[tensor.dtype]).astype(np.float32)


def _largest(values: F32) -> F32:
    """Return the largest size in each block."""
    sizes = np.abs(values)
    full = len(sizes) // _BLOCK * _BLOCK
    found = sizes[:full].reshape(-1, _BLOCK).max(axis=1)
    return found if full == len(sizes) else np.append(found, np.maximum(sizes[full:].max(), _LEAST))


def _nested(scales: F32, mean: np.float32) -> F32:
    """Return scales that were rounded to eight bits less their mean: of whole outer blocks, but for the last of all."""
    levels, bounds = _dynamic()
    moved = scales - mean
    each = _OUTER // _BLOCK
    made = np.empty_like(moved)
    for at in range(0, len(moved), each):
        part = moved[at : at + each]
        outer = np.abs(part).max()
        scaled = np.clip(part * (np.float32(1) / np.maximum(outer, _LEAST)), -1, 1)
        made[at : at + each] = levels[np.searchsorted(bounds, scaled)] * outer
    return made + mean


def _mean(encoding: RoundedAs, read: Read) -> np.float32:
    """Return the mean of the scales of all blocks: the whole weight is read once, a part at a time."""
    if "mean" not in encoding.measured:
        size = encoding.spec.numel
        parts = (_largest(_plain(encoding, at, min(at + _AT_ONCE, size), read)) for at in range(0, size, _AT_ONCE))
        total = math.fsum(float(part.sum(dtype=np.float64)) for part in parts)
        encoding.measured["mean"] = total / -(-size // _BLOCK)
    return np.float32(encoding.measured["mean"])


@cache
def _levels(levels: tuple[float, ...]) -> tuple[F32, F32]:
    """Return levels and what lies in the middle between them."""
    values = np.array(levels, np.float32)
    return values, (values[1:] + values[:-1]) / np.float32(2)


@cache
def _dynamic() -> tuple[F32, F32]:
    """Return the levels of eight bits and what lies in the middle between them: bitsandbytes' `create_dynamic_map`.

    Seven decades, of 1 to 64 levels each, and their negatives, 0 and 1.
    """
    sizes = [size for decade in range(7) for size in _decade(decade)]
    return _levels(tuple(sorted([*sizes, *(-size for size in sizes), 0.0, 1.0])))


def _decade(number: int) -> Iterator[float]:
    # as torch's linspace: from both ends to the middle, with one rounding for product and sum
    count = 2**number + 1
    at, step = np.arange(count), float((np.float32(1) - np.float32(0.1)) / np.float32(count - 1))
    edges = np.where(at < count // 2, float(np.float32(0.1)) + step * at, 1 - step * (count - 1 - at)).astype(
        np.float32
    )
    means = (edges[:-1] + edges[1:]) / np.float32(2)
    yield from (np.float32(10.0 ** (number - 6)) * means).tolist()
