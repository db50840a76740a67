"""Numbers stored again as a quantised weight was stored: its scales are kept, and raised where a number does not fit.

A base lies exactly on the grid of its codes, so that another scale would move every weight of the tile and the old one
moves only those that change. code = v / scale, rounded to nearest even, as quantisers do who divide
(compressed-tensors, axolotl); bitsandbytes' int8 multiplies with 127 / largest. A raised scale is the largest size /
the largest code, rounded to its type; a power of two is the next that is large enough, for rounding down would halve
what fits. Codes with zero points are (v / scale) + zero; see `zero_points`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.arrays import F32, INT8_STEP, STORED, Array, Bytes, ReadRows, bytes_of, wide
from lora_tool.formats.quantised.coded import signed
from lora_tool.formats.quantised.encodings import BnbInt8, PackedIntegers
from lora_tool.formats.quantised.grids import (
    INT8_MOST,
    WORD,
    Grid,
    Requantisable,
    grid_of,
    limits,
    scales_of,
    type_of_codes,
    zeros_of,
)

_CACHED = 1 << 16
"""Weights that are divided, rounded and packed together."""


class StoredAgain(Struct, frozen=True, kw_only=True):
    """Rows of a weight as codes again."""

    codes: Bytes
    """[rows, columns]"""
    scales: F32
    """[rows of scales, across]"""
    before: F32
    """The base's numbers of the first rows."""
    meant: F32
    """The merged ones."""


class Scales(Struct, frozen=True):
    """Rows of scales as they are stored, and the zero points of their tiles, int8, where there are any: [rows, across]."""

    stored: Array
    zeros: Array | None = None


def settled(encoding: Requantisable, of: tuple[int, int], low: F32, high: F32, read: ReadRows) -> Scales:
    """Return these rows of scales as the values between `low` and `high` need them: the base's where they fit."""
    stored, zeros = stored_scales(encoding, *of, read), stored_zeros(encoding, *of, read)
    if zeros is None:
        return Scales(_raised(encoding, stored, low, high))
    return Scales(*moved(encoding, stored, zeros, low, high))


def stored_scales(encoding: Requantisable, first: int, last: int, read: ReadRows) -> Array:
    """Return the rows `first` to `last` of scales as they are stored, [rows, across]."""
    tensor, across = scales_of(encoding), grid_of(encoding).across
    row = across * tensor.dtype.bits // 8
    return read(tensor, first * row, (last - first) * row).view(STORED[tensor.dtype]).reshape(-1, across)


class Rounding:
    """How numbers become codes, in numpy; whoever does it faster gives the same bits. Not shared between threads."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def extremes(self, encoding: Requantisable, values: F32, first: int, scales: tuple[int, int]) -> tuple[F32, F32]:
        """Return the least and the largest value of each tile, [rows of scales, across], among `values`, rows from `first`.

        Rows without a value have the neutral ones, infinities.
        """
        grid = grid_of(encoding)
        low = np.full((scales[1] - scales[0], grid.across), np.inf, np.float32)
        high = -low
        self._extremes(grid, values, first, scales[0], low, high)
        return low, high

    def codes(self, encoding: Requantisable, values: F32, scales: Scales, first: int, above: int) -> Array:
        """Return the codes of `values`, rows from `first`, until the next; `values` may be lost.

        The rows of `scales` begin with row `above`.
        """
        divided = not isinstance(encoding, BnbInt8)
        factors: Array = _of_codes(encoding, scales.stored) if divided else scales.stored
        factors = np.where(factors == 0, np.float32(1), factors)  # of a tile of zeros
        factors = factors if divided else np.float32(INT8_MOST) / factors
        if self._memory.size < values.size:
            self._memory = np.empty(values.size, np.uint8)
        out = self._memory[: values.size].view(STORED[type_of_codes(encoding)]).reshape(values.shape)
        factors = factors.astype(np.float32, copy=False)
        if scales.zeros is None:
            self._codes(encoding, values, factors, (first, above), out)
        else:
            self._codes_about(encoding, values, factors, scales.zeros.astype(np.float32), (first, above), out)
        return out

    def _extremes(self, grid: Grid, values: F32, first: int, scales: int, low: F32, high: F32) -> None:
        """Write the extremes of tiles that have values to `low` and `high`."""
        edges = np.arange(0, grid.width, grid.tile[1])
        for rows, own in grid.parts(first, first + len(values), scales):
            for function, found in ((np.minimum, low), (np.maximum, high)):
                part = values[rows] if grid.tile[0] == 1 else function.reduce(values[rows], axis=0, keepdims=True)
                one = grid.across == 1
                reduced = (
                    function.reduce(part, axis=1, keepdims=True) if one else function.reduceat(part, edges, axis=1)
                )
                found[own] = reduced

    def _codes(self, encoding: Requantisable, values: F32, factors: F32, at: tuple[int, int], out: Array) -> None:
        """Write the codes of `values`; `at` are the first row of values and of `factors`, which bnb's are multiplied with."""
        grid, (least, most) = grid_of(encoding), limits(encoding)
        for rows, own in _strips(grid, at[0], len(values), at[1]):
            part, factor = values[rows], _spread(grid, factors[own])
            (np.multiply if isinstance(encoding, BnbInt8) else np.divide)(part, factor, out=part)
            np.clip(part, least, most, out=part)
            if out.dtype == np.int8:
                np.copyto(out[rows], np.rint(part, out=part), casting="unsafe")
            else:
                out[rows] = _e4m3_codes(part).view(out.dtype)

    def _codes_about(
        self, encoding: Requantisable, values: F32, factors: F32, zeros: F32, at: tuple[int, int], out: Array
    ) -> None:
        """Do the same as `_codes` for codes with zero points."""
        grid, (least, most) = grid_of(encoding), limits(encoding)
        for rows, own in _strips(grid, at[0], len(values), at[1]):
            part = values[rows]
            np.divide(part, _spread(grid, factors[own]), out=part)
            np.add(part, _spread(grid, zeros[own]), out=part)
            np.clip(part, least, most, out=part)
            np.copyto(out[rows], np.rint(part, out=part), casting="unsafe")


def _raised(encoding: Requantisable, stored: Array, low: F32, high: F32) -> Array:
    """Return the stored scales, [rows, across], raised where the values between `low` and `high` do not fit."""
    least, most = (np.float32(limit) for limit in limits(encoding))
    room = np.abs(_of_codes(encoding, stored))
    needed = np.maximum(high / most, low / least)
    if isinstance(encoding, BnbInt8):
        needed = np.maximum(high, -low)  # `SCB` is the value of the largest code
    too_far = (high > most * room) | (low < least * room)
    return np.asarray(np.where(too_far, _as_scale(needed, scales_of(encoding).dtype), stored))


def as_stored(encoding: Requantisable, stored: Array, scales: F32) -> Array:
    """Return scales, which are as their type can be, as they are stored: as the base's `stored` where they are equal."""
    before = wide(stored, scales_of(encoding).dtype)
    return np.asarray(np.where(scales == before, stored, _as_scale(scales, scales_of(encoding).dtype)))


def bytes_of_codes(encoding: Requantisable, codes: Array) -> Bytes:
    """Return rows of codes as they are stored, [rows, bytes]: those in words plus 128, and each row in whole words."""
    raw: Bytes = codes.view(np.uint8)
    if not isinstance(encoding, PackedIntegers):
        return raw
    stored = np.zeros((len(raw), 4 * encoding.codes.shape[-1]), np.uint8)
    stored[:, : raw.shape[1]] = signed(raw)
    return stored


def codes_of_rows(encoding: Requantisable, first: int, last: int, read: ReadRows) -> Array:
    """Return rows of the codes that are stored, [rows, columns]."""
    grid, stored = grid_of(encoding), encoding.codes
    row = stored.nbytes // grid.rows
    raw = bytes_of(stored, row, first, last, read)[:, : grid.width]
    return (signed(raw) if isinstance(encoding, PackedIntegers) else raw).view(STORED[type_of_codes(encoding)])


def numbers_of(encoding: Requantisable, coded: Array, scales: Scales, first: int, above: int) -> F32:
    """Return the values of codes, rows from `first`, with these scales, rows from `above`."""
    grid, factors = grid_of(encoding), _of_codes(encoding, scales.stored)
    values = coded.astype(np.float32)
    for rows, own in grid.parts(first, first + len(values), above):
        if scales.zeros is not None:
            values[rows] -= _spread(grid, scales.zeros[own])
        values[rows] *= _spread(grid, factors[own])
    return values


def _of_codes(encoding: Requantisable, stored: Array) -> F32:
    """Return the factors of codes, from stored scales."""
    scales = wide(stored, scales_of(encoding).dtype)
    return np.asarray(scales * INT8_STEP if isinstance(encoding, BnbInt8) else scales)


def _spread(grid: Grid, scales: Array) -> Array:
    """Return scales for each column of their rows, or one for all."""
    return scales if grid.across == 1 else np.repeat(scales, grid.tile[1], axis=1)[:, : grid.width]


def _strips(grid: Grid, first: int, count: int, scales: int) -> Iterator[tuple[slice, slice]]:
    """Yield the same as `Grid.parts`, a few rows at a time, so that they stay in the processor's cache."""
    step = max(1, _CACHED // grid.width)
    for rows, own in grid.parts(first, first + count, scales):
        for at in range(rows.start, rows.stop, step):
            end = min(at + step, rows.stop)
            mine = slice(own.start + at - rows.start, own.start + end - rows.start) if grid.tile[0] == 1 else own
            yield slice(at, end), mine


def _as_scale(needed: F32, dtype: DType) -> Array:
    """Return positive numbers in the type of scales: the nearest, of powers of two the next that is not smaller."""
    if dtype not in (DType.U8, DType.F8_E8M0):
        return needed.astype(STORED[dtype])
    fraction, exponent = np.frexp(needed)
    exponent = np.where(fraction > 0.5, exponent, exponent - 1)  # noqa: PLR2004 - frexp's fraction of a power of two
    return np.asarray(np.clip(exponent + 127, 0, 254).astype(np.uint8).view(STORED[dtype]))


def _e4m3_codes(values: F32) -> NDArray[np.uint8]:
    """Return float32 values of at most 448 in size as E4M3, to nearest even: ml_dtypes' bits, in half the time."""
    bits: NDArray[Any] = values.view(np.uint32)
    sign = ((bits >> 24) & 0x80).astype(np.uint8)
    size = bits & np.uint32(0x7FFFFFFF)
    # below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves their number in the last bits
    subnormal = (size.view(np.float32) + np.float32(2**14)).view(np.uint32) - np.uint32(0x46800000)
    normal = ((size + np.uint32(0x7FFFF) + ((size >> 20) & 1)) >> 20) - np.uint32(120 << 3)
    return np.asarray(np.where(size < np.uint32(121 << 23), subnormal, normal).astype(np.uint8) | sign)


# The zero points of tiles: value = (code - zero) · scale, so that the codes of a tile lie about its zero.
#
# The numbers that a tile can be are multiples of its scale, wherever its zero is. Merged numbers whose nearest codes are
# beyond the last get another zero first, which moves no number that did not change, and a larger scale only where they
# are farther apart than all codes are. Both are chosen as compressed-tensors chooses them (`calculate_qparams`): scale =
# (most - least) / (number of codes - 1) with 0 between the two, zero = least code - least / scale. The scale is rounded
# up, for otherwise some of the numbers might be beyond the last code again.


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
