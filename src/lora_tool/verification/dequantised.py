"""The numbers that quantised weights stand for, by a second formula: arithmetic on the bits of each code, in float64.

Nothing here is shared with what decodes for the writer, which decodes through tables, a block at a time. Here each
value finds its own code and scale by its place in the matrix, a float of few bits is assembled from its fields, and
a product is formed in float64 and rounded where the format's library rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.core.choices import assert_never
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.arrays import Strips
from lora_tool.formats.quantised.encodings import (
    ORDER,
    Bnb4,
    BnbInt8,
    ColumnIntegers,
    Encoding,
    Fp4,
    NestedScales,
    OffsetIntegers,
    PackedIntegers,
    RoundedAs,
    Tiled,
    rows_together,
)
from lora_tool.verification.rounded_again import rounded_again

Array = NDArray[Any]
ReadBytes = Callable[[StoredTensor, int, int], NDArray[np.uint8]]
ReadRanges = Callable[[StoredTensor, Sequence[tuple[int, int]], int], NDArray[np.uint8]]
"""Gives the bytes of ranges of rows, of so many bytes each, one after the other."""

_MX_BIAS = 127
_NO_POWER = 255
"""The power of two that is NaN."""


def dequantised_again(
    encoding: Encoding, first: int, last: int, read: ReadBytes, strips: Strips | None = None
) -> Array:
    """Return rows `first` to `last` of the dequantised weight, [rows, columns], in the type of its values.

    Who wants one block of rows after the other gives the same `strips` each time.
    """
    strips = strips or Strips(keeps=False)
    width = encoding.spec.shape[-1]
    rows, columns = np.arange(first, last)[:, None], np.arange(width)[None, :]
    match encoding:
        case Tiled():
            values = _tiled(encoding, [(first, last)], partial(_each, read))
        case OffsetIntegers():
            values = _offset(encoding, rows, columns, read)
        case BnbInt8():
            codes = _signed(_elements(encoding.codes, rows * width + columns, 1, read))
            values = _single(_single(codes * _floats(encoding.largest, rows, read)) * float(np.float32(1 / 127)))
        case Bnb4():
            values = _bnb4(encoding, rows * width + columns, read)
        case PackedIntegers():
            values = _packed(encoding, rows, columns, read)
        case Fp4():
            values = _fp4(encoding, rows, columns, _Turned(encoding, strips, read))
        case ColumnIntegers():
            values = _columns(encoding, rows, columns, _Turned(encoding, strips, read))
        case RoundedAs():
            values = rounded_again(encoding, rows * width + columns, read)
        case _:
            return assert_never(encoding)
    return _rounded_to(values.astype(np.float32), encoding.spec.dtype)


def _rounded_to(values: NDArray[np.float32], dtype: DType) -> Array:
    """Return the bits of float32 values rounded to a type, to nearest, ties to even."""
    if dtype is DType.BF16:
        bits = values.view(np.uint32)
        up = np.where(np.isfinite(values), 0x7FFF + ((bits >> 16) & 1), 0).astype(np.uint32)
        return np.asarray(((bits + up) >> 16).astype(np.uint16))
    return values.astype(np.float16) if dtype is DType.F16 else values


def _single(values: Array) -> Array:
    """Return float64 values rounded to float32, where a library computes in that type."""
    return values.astype(np.float32).astype(np.float64)


def _elements(tensor: StoredTensor, at: Array, size: int, read: ReadBytes) -> Array:
    """Return the elements of `size` bytes at these places as unsigned integers; the bytes from the first to the last are read once."""
    low, high = int(at.min()), int(at.max()) + 1
    return np.asarray(read(tensor, low * size, (high - low) * size).view(f"<u{size}")[at - low])


def _floats(tensor: StoredTensor, at: Array, read: ReadBytes) -> Array:
    """Return the numbers at these places, float64."""
    return _as_floats(tensor, _elements(tensor, at, tensor.dtype.bits // 8, read))


def _as_floats(tensor: StoredTensor, bits: Array) -> Array:
    """Return the values of a tensor's elements, given as bits, in float64."""
    size = tensor.dtype.bits // 8
    if tensor.dtype in (DType.U8, DType.F8_E8M0):
        return np.where(bits == _NO_POWER, np.nan, np.ldexp(1.0, bits.astype(np.int32) - _MX_BIAS))
    if tensor.dtype is DType.F8_E4M3:
        return small_floats(bits, exponent=4, mantissa=3)
    if tensor.dtype is DType.BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(f"<f{size}").astype(np.float64)


def floats_of(tensor: StoredTensor, first: int, last: int, read: ReadBytes) -> Array:
    """Return elements `first` to `last` of a tensor of scales, float64."""
    size = tensor.dtype.bits // 8
    return _as_floats(tensor, read(tensor, first * size, (last - first) * size).view(f"<u{size}"))


def small_floats(bits: Array, *, exponent: int, mantissa: int) -> Array:
    """Return what floats of one sign bit and so many others are: E4M3's NaN, all ones, among them; E2M1 has none."""
    bits = bits.astype(np.int32)
    fraction, power = bits & ((1 << mantissa) - 1), (bits >> mantissa) & ((1 << exponent) - 1)
    hidden = np.where(power > 0, 1 << mantissa, 0)
    bias = (1 << (exponent - 1)) - 1
    sizes = np.ldexp((hidden + fraction).astype(np.float64), np.maximum(power, 1) - bias - mantissa)
    if exponent + mantissa == 7:  # noqa: PLR2004 - E4M3
        sizes = np.where(bits & 0x7F == 0x7F, np.nan, sizes)  # noqa: PLR2004 - all ones
    return np.asarray(np.where(bits >> (exponent + mantissa), -sizes, sizes))


def _signed(codes: Array) -> Array:
    """Return bytes in two's complement as numbers."""
    return np.asarray(np.where(codes < 128, codes, codes.astype(np.int32) - 256).astype(np.float64))  # noqa: PLR2004 - half of 256


@cache
def _bytes_as(dtype: DType) -> Array:
    """Return what each byte is as a code of eight bits."""
    every = np.arange(256)
    return _signed(every) if dtype is DType.I8 else small_floats(every, exponent=4, mantissa=3)


def tiled_again(encoding: Tiled, ranges: Sequence[tuple[int, int]], read: ReadRanges) -> Array:
    """Return ranges of rows, one after the other, as `dequantised_again` does: a sample is thousands of single rows."""
    return _rounded_to(_tiled(encoding, ranges, read).astype(np.float32), encoding.spec.dtype)


def _tiled(encoding: Tiled, ranges: Sequence[tuple[int, int]], read: ReadRanges) -> Array:
    height, width = encoding.spec.shape[-2:]
    down, across = encoding.tile
    of_matrix, per_row = math.ceil(height / down), math.ceil(width / across)
    lines, places, held = [], [], 0
    for first, last in ranges:
        matrix, row = np.divmod(np.arange(first, last), height)
        line = matrix * of_matrix + row // down
        low, high = int(line[0]), int(line[-1]) + 1
        lines.append((low, high))
        places.append(line - low + held)
        held += high - low
    size = encoding.scales.dtype.bits // 8
    stored = read(encoding.scales, lines, per_row * size).view(f"<u{size}")
    scales = _as_floats(encoding.scales, stored).reshape(-1, per_row)
    codes = np.take(_bytes_as(encoding.codes.dtype), read(encoding.codes, ranges, width).reshape(-1, width))
    codes *= np.repeat(scales, across, axis=1)[:, :width][np.concatenate(places)]
    return np.asarray(codes)


def _each(
    read: ReadBytes, tensor: StoredTensor, ranges: Sequence[tuple[int, int]], row_bytes: int
) -> NDArray[np.uint8]:
    """Return the bytes of ranges of rows, one after the other."""
    return np.concatenate([read(tensor, first * row_bytes, (last - first) * row_bytes) for first, last in ranges])


def _offset(encoding: OffsetIntegers, rows: Array, columns: Array, read: ReadBytes) -> Array:
    height, width = encoding.spec.shape[-2:]
    down, across = encoding.tile
    matrix, row = np.divmod(rows, height)
    place = (matrix * math.ceil(height / down) + row // down) * math.ceil(width / across) + columns // across
    codes, zeros = (
        _signed(_elements(tensor, at, 1, read))
        for tensor, at in ((encoding.codes, rows * width + columns), (encoding.zeros, place))
    )
    return np.asarray((codes - zeros) * _floats(encoding.scales, place, read))


def _bnb4(encoding: Bnb4, at: Array, read: ReadBytes) -> Array:
    byte = _elements(encoding.codes, at // 2, 1, read)
    codes = np.where(at % 2 == 0, byte // 16, byte % 16)
    levels = _floats(encoding.levels, codes, read) if codes.size else codes
    return levels * _bnb_scales(encoding.scales, at // encoding.block, read)


def _bnb_scales(scales: StoredTensor | NestedScales, blocks: Array, read: ReadBytes) -> Array:
    if isinstance(scales, StoredTensor):
        return _floats(scales, blocks, read)
    levels = _floats(scales.levels, _elements(scales.codes, blocks, 1, read), read)
    nested = _single(levels * _floats(scales.scales, blocks // scales.block, read))
    return _single(nested + float(np.float32(scales.offset)))


def _packed(encoding: PackedIntegers, rows: Array, columns: Array, read: ReadBytes) -> Array:
    bits, words = encoding.bits, encoding.codes.shape[-1]
    codes = from_stream(encoding.codes, rows * words, columns, 1, bits, read)
    one = math.prod(encoding.scales.shape) == 1
    groups = encoding.spec.shape[-1] // encoding.group
    group = columns // encoding.group
    if encoding.groups is not None:
        said = read(encoding.groups, 0, encoding.groups.nbytes).view("<i4")
        group = group if -1 in said else said[columns].astype(np.int64)
    place = np.zeros_like(rows + columns) if one else rows * groups + group
    zeros = np.zeros(1)
    if encoding.zeros is not None and encoding.zeros.dtype is DType.I8:
        of_all = encoding.zeros.spec.numel == 1
        zeros = _signed(_elements(encoding.zeros, place if of_all else rows * groups + group, 1, read))
    elif encoding.zeros is not None:
        zeros = from_stream(encoding.zeros, group, rows, groups, bits, read)
    return (codes - zeros) * _floats(encoding.scales, place, read)


def from_stream(tensor: StoredTensor, begin: Array, number: Array, stride: int, bits: int, read: ReadBytes) -> Array:
    """Return the codes of this number in streams of words that begin at `begin`, each `stride` after the one before."""
    first = number * bits
    code = np.zeros(np.broadcast(begin, number).shape, np.int64)
    for bit in range(bits):
        place = first + bit
        word = _elements(tensor, begin + place // 32 * stride, 4, read).astype(np.int64)
        code |= ((word >> (place % 32)) & 1) << bit
    return (code - (1 << (bits - 1))).astype(np.float64)


class _Turned(Struct, frozen=True):
    """Elements of matrices whose columns are rows of the weight: the columns of many rows are read together."""

    encoding: Encoding
    strips: Strips
    read: ReadBytes

    def elements(self, tensor: StoredTensor, width: int, size: int, place: tuple[Array, Array], each: int = 1) -> Array:
        """Return elements of `size` bytes, unsigned, at a row and a column of rows of `width` elements.

        A column of elements is `each` rows of the weight.
        """
        row, column = place
        low, high = int(column.min()), int(column.max()) + 1
        some = low, high
        together = rows_together(self.encoding)
        if together is not None:
            step = together // each
            low = low // step * step
            high = max(high, min(low + step, width))
        rows = int(row.min()), int(row.max()) + 1
        of, ahead = (slice(first * size, last * size) for first, last in (some, (low, high)))
        raw = self.strips.columns(tensor, width * size, rows, of, ahead, self.read)
        return np.asarray(np.ascontiguousarray(raw).view(f"<u{size}")[row - rows[0], column - some[0]])


def _fp4(encoding: Fp4, rows: Array, columns: Array, columnwise: _Turned) -> Array:
    if encoding.below:
        return _fp4_below(encoding, rows, columns, columnwise.read)
    if encoding.transposed:
        inside, outputs = encoding.spec.shape[-2:]
        matrix, column = np.divmod(rows, inside)
        rows, columns = matrix * outputs + columns, column
        width = inside
    else:
        width = encoding.spec.shape[-1]
    byte = columnwise.elements(encoding.codes, width // 2, 1, (rows, columns // 2), 2)
    codes = small_floats(np.where(columns % 2, byte >> 4, byte & 15), exponent=2, mantissa=1)
    each, size = encoding.group, encoding.scales.dtype.bits // 8
    stored = columnwise.elements(encoding.scales, width // each, size, (rows, columns // each), each)
    scales = _as_floats(encoding.scales, stored)
    return codes * _with_overall(encoding, scales, columnwise.read)


def _fp4_below(encoding: Fp4, rows: Array, columns: Array, read: ReadBytes) -> Array:
    width = encoding.spec.shape[-1]
    byte = _elements(encoding.codes, rows // 2 * width + columns, 1, read)
    codes = small_floats(np.where(rows % 2, byte >> 4, byte & 15), exponent=2, mantissa=1)
    scales = _floats(encoding.scales, rows // encoding.group * width + columns, read)
    return np.asarray(codes * _with_overall(encoding, scales, read))


def _with_overall(encoding: Fp4, scales: Array, read: ReadBytes) -> Array:
    """Return scales with the one that all of them have, rounded to float32."""
    if encoding.overall is None:
        return scales
    overall = _floats(encoding.overall, np.zeros(1, np.int64), read)
    return _single(scales / overall if encoding.divides else scales * overall)


def _columns(encoding: ColumnIntegers, outputs: Array, inputs: Array, columnwise: _Turned) -> Array:
    bits, words, height = encoding.bits, encoding.codes.shape[-1], encoding.spec.shape[0]
    mask, each = (1 << bits) - 1, 32 // bits
    place = np.array([ORDER.index(at) for at in range(each)]) if encoding.across else np.arange(each)
    if encoding.across:
        word = columnwise.elements(encoding.codes, words, 4, (inputs, outputs // each), each)
        shift = bits * place[outputs % each]
    else:
        word = columnwise.elements(encoding.codes, words, 4, (inputs // each, outputs))
        shift = bits * (inputs % each)
    codes = (word >> shift.astype(np.uint32)) & np.uint32(mask)
    group = inputs // encoding.group
    if encoding.groups is not None:
        group = columnwise.strips.whole(encoding.groups, columnwise.read).view("<u4")[inputs].astype(np.int64)
    stored = columnwise.elements(encoding.zeros, encoding.zeros.shape[-1], 4, (group, outputs // each), each)
    whole = (stored.astype(np.int64) + encoding.added) % (1 << 32)
    zeros = (whole >> bits * place[outputs % each]) & mask
    size = encoding.scales.dtype.bits // 8
    scales = _as_floats(encoding.scales, columnwise.elements(encoding.scales, height, size, (group, outputs)))
    return np.asarray((codes.astype(np.float64) - zeros) * scales)
