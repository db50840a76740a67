"""The zero points of tiles: value = (code - zero) · scale, so that the codes of a tile lie about its zero.

The numbers that a tile can be are multiples of its scale, wherever its zero is. Merged numbers whose nearest codes are
beyond the last get another zero first, which moves no number that did not change, and a larger scale only where they
are farther apart than all codes are. Both are chosen as compressed-tensors chooses them (`calculate_qparams`): scale =
(most - least) / (number of codes - 1) with 0 between the two, zero = least code - least / scale. The scale is rounded
up, for otherwise some of the numbers might be beyond the last code again.
"""

from __future__ import annotations

import numpy as np

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.arrays import F32, STORED, Array, Bytes, ReadRows, wide
from lora_tool.formats.quantised.coded import signed
from lora_tool.formats.quantised.grids import WORD, Requantisable, grid_of, limits, scales_of, zeros_of

_HALF = np.float32(0.5)


def stored_zeros(encoding: Requantisable, first: int, last: int, read: ReadRows) -> Array | None:
    """Return the zero points of rows `first` to `last` of scales, [rows, across], int8; None where there are none."""
    tensor, across = zeros_of(encoding), grid_of(encoding).across
    if tensor is None:
        return None
    if tensor.dtype is DType.I8:
        return read(tensor, first * across, (last - first) * across).view(np.int8).reshape(-1, across)
    top, bottom = first // WORD, -(-last // WORD)
    words = read(tensor, top * WORD * across, (bottom - top) * WORD * across)
    rows = signed(words).reshape(-1, across, WORD).transpose(0, 2, 1).reshape(-1, across).view(np.int8)
    return rows[first - top * WORD : last - top * WORD]


def bytes_of_zeros(tensor: StoredTensor, zeros: Array) -> Bytes:
    """Return zero points as the tensor stores them: those of rows below each other may be one word."""
    raw = np.ascontiguousarray(zeros).view(np.uint8)
    if tensor.dtype is DType.I8:
        return raw
    whole = np.zeros((-(-len(raw) // WORD) * WORD, raw.shape[1]), np.uint8)
    whole[: len(raw)] = signed(raw)
    return np.ascontiguousarray(whole.reshape(-1, WORD, raw.shape[1]).transpose(0, 2, 1))


def moved(encoding: Requantisable, stored: Array, zeros: Array, low: F32, high: F32) -> tuple[Array, Array]:
    """Return stored scales and zero points, chosen anew where the codes nearest to `low` or `high` are beyond the last."""
    least, most = (np.float32(limit) for limit in limits(encoding))
    dtype = scales_of(encoding).dtype
    scales, about = wide(stored, dtype), zeros.astype(np.float32)
    one, other = (least - _HALF - about) * scales, (most + _HALF - about) * scales
    outside = (low < np.minimum(one, other)) | (high > np.maximum(one, other))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    needed = (high - low) / (most - least)
    nearest = needed.astype(STORED[dtype])
    larger = np.where(wide(nearest, dtype) < needed, np.nextafter(nearest, nearest.dtype.type(np.inf)), nearest)
    chosen = np.where(outside & (needed > scales), larger, stored)
    lowest = least - low / wide(chosen, dtype)
    return chosen, np.where(outside, np.rint(np.clip(lowest, least, most)), about).astype(np.int8)
