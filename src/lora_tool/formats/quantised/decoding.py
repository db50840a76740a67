"""Decoding of quantised weights in numpy, a few rows at a time, for writers to compute with.

The results equal, bit for bit, those of each format's library on a CPU: transformers 5.23 (`Fp8Dequantize`,
`convert_moe_packed_tensors`), bitsandbytes 0.50 (`dequantize_4bit`, `dequantize_blockwise`, LLM.int8()),
compressed-tensors 0.20 (`decompress`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_tool.core.choices import assert_never
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.arrays import F32, STORED, Array, ReadRows, Strips, bytes_of, numbers, rows_of, widened
from lora_tool.formats.quantised.coded import Scaled, bnb_scales, coded, e2m1, fp4_scales, levels_of, scales_of_rows
from lora_tool.formats.quantised.encodings import (
    ORDER,
    Bnb4,
    BnbInt8,
    ColumnIntegers,
    Encoding,
    Fp4,
    OffsetIntegers,
    PackedIntegers,
    RoundedAs,
    Tiled,
    rows_together,
)
from lora_tool.formats.quantised.rounded_as import rounded_as


class Arithmetic:
    """How codes become numbers, in numpy; whoever does it faster gives the same bits."""

    def scale(self, part: Scaled, out: F32) -> None:
        """Write the values of `part` to `out`, [rows, columns]."""
        # index the two numbers of a byte as one element: numpy is six times slower with rows of the table
        table = np.ascontiguousarray(part.table.numbers)
        two = table.view(f"u{table.shape[1] * 4}")[:, 0]
        for rows, scales in part.stretches():
            codes, values = part.codes[rows], out[rows]
            if part.columns == table.shape[1] * codes.shape[1]:
                np.take(two, codes, out=values.view(two.dtype), mode="clip")
            else:
                np.copyto(values, np.take(two, codes).view(np.float32)[:, : part.columns])
            spread = scales if scales.shape[1] == 1 else np.repeat(scales, part.group, axis=1)
            np.multiply(values, spread[:, : part.columns], out=values)
            if part.again != 1:
                np.multiply(values, part.again, out=values)

    def rounded(self, values: F32, dtype: DType) -> Array:
        """Return float32 values rounded to a type."""
        return values.astype(STORED[dtype], copy=False)


_IN_NUMPY = Arithmetic()


def decoded(
    encoding: Encoding,
    first: int,
    last: int,
    read: ReadRows,
    arithmetic: Arithmetic = _IN_NUMPY,
    strips: Strips | None = None,
) -> Array:
    """Return rows `first` to `last` of the decoded weight, [rows, columns], in the type of its values.

    The rows of a stack of matrices are those of all, one after the other. Who wants one block of rows after the other
    gives the same `strips` each time.
    """
    parts = coded(encoding, first, last, read)
    if parts is None:
        values = _otherwise(encoding, first, last, read, arithmetic, strips)
    else:
        values = np.empty((last - first, encoding.spec.shape[-1]), np.float32)
        at = 0
        for part in parts:
            arithmetic.scale(part, values[at : at + len(part.codes)])
            at += len(part.codes)
    return arithmetic.rounded(values, encoding.spec.dtype)


def _otherwise(
    encoding: Encoding, first: int, last: int, read: ReadRows, arithmetic: Arithmetic, strips: Strips | None
) -> F32:
    """Return rows of the encodings that `coded` does not cover."""
    strips = strips or Strips(keeps=False)
    match encoding:
        case Bnb4():
            return _bnb4(encoding, first, last, read, arithmetic)
        case PackedIntegers() | OffsetIntegers():
            return _integers(encoding, first, last, read)
        case Fp4():
            return _fp4(encoding, first, last, read, arithmetic, strips)
        case ColumnIntegers():
            return _columns(encoding, first, last, read, strips)
        case RoundedAs():
            return rounded_as(encoding, first, last, read)
        case Tiled() | BnbInt8():
            raise AssertionError(f"{encoding} is codes with their scales")
        case _:
            return assert_never(encoding)


def _integers(encoding: PackedIntegers | OffsetIntegers, first: int, last: int, read: ReadRows) -> F32:
    if isinstance(encoding, PackedIntegers):
        return _packed(encoding, first, last, read)
    return _offset(encoding, first, last, read)


def _offset(encoding: OffsetIntegers, first: int, last: int, read: ReadRows) -> F32:
    height, width = encoding.spec.shape[-2:]
    down, across = encoding.tile
    matrices, rows = np.divmod(np.arange(first, last), height)
    lines, groups = matrices * -(-height // down) + rows // down, -(-width // across)
    begin, end = int(lines[0]), int(lines[-1]) + 1
    scales, zeros = (
        numbers(each, begin * groups, end * groups, read).reshape(-1, groups)[lines - begin]
        for each in (encoding.scales, encoding.zeros)
    )
    codes = rows_of(encoding.codes, first, last, read).astype(np.float32)
    group = np.arange(width) // across
    return np.asarray((codes - zeros[:, group]) * scales[:, group])


def _bnb4(encoding: Bnb4, first: int, last: int, read: ReadRows, arithmetic: Arithmetic) -> F32:
    """Return rows that blocks cross."""
    width, block = encoding.spec.shape[-1], encoding.block
    begin, end = first * width, last * width
    blocks = range(begin // block, -(-end // block))
    start = blocks.start * block
    codes = read(encoding.codes, start // 2, -(-end // 2) - start // 2)[None]
    scales = bnb_scales(encoding.scales, blocks, read)[None]
    values = np.empty((1, end - start), np.float32)
    table = levels_of(encoding, read)
    arithmetic.scale(Scaled(codes=codes, table=table, scales=scales, group=block, columns=end - start), values)
    return values[0, begin - start :].reshape(last - first, width)


def _packed(encoding: PackedIntegers, first: int, last: int, read: ReadRows) -> F32:
    """Return rows of codes of any width, with zeros or without."""
    width = encoding.spec.shape[-1]
    scales = scales_of_rows(encoding.scales, first, last, read)
    codes = _unpacked(rows_of(encoding.codes, first, last, read), encoding.bits, width).astype(np.float32)
    codes -= np.float32(1 << (encoding.bits - 1))
    if encoding.zeros is not None:
        zeros = _zeros(encoding.zeros, encoding.bits, first, last, scales.shape[1], read)
        np.subtract(codes, _of_inputs(encoding, zeros, read), out=codes)
    return np.multiply(codes, _of_inputs(encoding, scales, read), out=codes)


def _of_inputs(encoding: PackedIntegers, of_groups: F32, read: ReadRows) -> F32:
    """Return each group's value of each row, repeated for the inputs of the group."""
    if encoding.groups is None:
        return of_groups if of_groups.shape[1] == 1 else np.repeat(of_groups, encoding.group, axis=1)
    return np.asarray(of_groups[:, _groups(encoding, read)])


def _groups(encoding: PackedIntegers, read: ReadRows) -> Array:
    """Return the group of each input."""
    width = encoding.spec.shape[-1]
    if encoding.groups is not None:
        found = read(encoding.groups, 0, encoding.groups.nbytes).view("<i4")
        if found.min() >= 0:
            return found
    return np.arange(width) // encoding.group


def _zeros(zeros: StoredTensor, bits: int, first: int, last: int, groups: int, read: ReadRows) -> F32:
    if zeros.dtype is DType.I8:
        return scales_of_rows(zeros, first, last, read)
    # the stream of each column begins anew: 32 rows of it are whole words
    top = first // 32
    words = rows_of(zeros, top * bits, min(-(-last // 32) * bits, zeros.shape[0]), read)
    found = _unpacked(np.ascontiguousarray(words.T), bits, len(words) * 32 // bits)
    found = found.T[first - 32 * top : last - 32 * top, :groups]
    return found.astype(np.float32) - np.float32(1 << (bits - 1))


def _unpacked(words: Array, bits: int, count: int) -> Array:
    """Return the first `count` codes in each row of 32-bit words, the lowest bits first."""
    if bits == 8:  # noqa: PLR2004 - a byte
        return words.view(np.uint8)[:, :count]
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        mask = np.uint32((1 << bits) - 1)
        return np.asarray((words[:, :, None] >> shifts) & mask).reshape(len(words), -1)[:, :count]
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    weights = (1 << np.arange(bits)).astype(np.uint32)
    return np.asarray(stream.reshape(len(words), count, bits) @ weights)


def _fp4(encoding: Fp4, first: int, last: int, read: ReadRows, arithmetic: Arithmetic, strips: Strips) -> F32:
    if encoding.below:
        return _fp4_below(encoding, first, last, read)
    return _fp4_transposed(encoding, first, last, read, arithmetic, strips)


def _fp4_below(encoding: Fp4, first: int, last: int, read: ReadRows) -> F32:
    """Return rows that lie two to a row of bytes, and share a row of scales in groups."""
    width, group = encoding.spec.shape[-1], encoding.group
    raw = bytes_of(encoding.codes, width, first // 2, -(-last // 2), read)
    scales = fp4_scales(encoding, width, first // group, -(-last // group), read)
    both = np.ascontiguousarray(e2m1().numbers[raw].transpose(0, 2, 1)).reshape(-1, width)
    values, spread = both[first % 2 :], np.repeat(scales, group, axis=0)[first % group :]
    return np.asarray(values[: last - first] * spread[: last - first])


def _fp4_transposed(
    encoding: Fp4, first: int, last: int, read: ReadRows, arithmetic: Arithmetic, strips: Strips
) -> F32:
    """Return rows of matrices that are stored transposed."""
    inside, outputs = encoding.spec.shape[-2:]
    made = []
    while first < last:
        matrix, top = divmod(first, inside)
        bottom = min(inside, top + last - first)
        rows = matrix * outputs, (matrix + 1) * outputs
        made.append(_fp4_columns(encoding, rows, slice(top, bottom), read, arithmetic, strips))
        first += bottom - top
    return made[0] if len(made) == 1 else np.concatenate(made)


def _fp4_columns(
    encoding: Fp4, rows: tuple[int, int], columns: slice, read: ReadRows, arithmetic: Arithmetic, strips: Strips
) -> F32:
    """Return columns of the matrix on disk that is these rows of all, as rows."""
    inside, group = encoding.spec.shape[-2], encoding.group
    aligned, ahead = (_in(part, group) for part in (columns, _ahead(encoding, columns, inside)))
    scales = strips.columns(encoding.scales, inside // group, rows, aligned, ahead, read)
    half = group // 2
    some, more = (slice(part.start * half, part.stop * half) for part in (aligned, ahead))
    codes = strips.columns(encoding.codes, inside // 2, rows, some, more, read)
    values = np.empty((len(codes), 2 * codes.shape[1]), np.float32)
    wide = widened(np.ascontiguousarray(scales), encoding.scales.dtype)
    arithmetic.scale(Scaled(codes=codes, table=e2m1(), scales=wide, group=group, columns=values.shape[1]), values)
    begin = columns.start - aligned.start * group
    return np.ascontiguousarray(values[:, begin : begin + columns.stop - columns.start].T)


def _ahead(encoding: Encoding, rows: slice, height: int) -> slice:
    """Return the rows of a weight, among them these, that are read together."""
    each = rows_together(encoding) or height
    first = rows.start // each * each
    return slice(first, max(rows.stop, min(first + each, height)))


def _in(places: slice, each: int) -> slice:
    """Return the groups of `each` that the places are in."""
    return slice(places.start // each, -(-places.stop // each))


def _columns(encoding: ColumnIntegers, first: int, last: int, read: ReadRows, strips: Strips) -> F32:
    """Return columns of the matrix on disk as rows."""
    outputs, inside = encoding.spec.shape
    bits, rows = encoding.bits, slice(first, last)
    ahead = _ahead(encoding, rows, outputs)

    def some(tensor: StoredTensor, each: int = 1) -> Array:
        """Return the columns of a stored matrix whose elements are `each` of the rows."""
        (height, width), size = tensor.shape, tensor.dtype.bits // 8
        of, more = (slice(part.start * size, part.stop * size) for part in (_in(rows, each), _in(ahead, each)))
        found = strips.columns(tensor, width * size, (0, height), of, more, read)
        return np.ascontiguousarray(found).view(STORED[tensor.dtype])

    each = 32 // bits
    if encoding.across:
        codes = _parts(some(encoding.codes, each), bits, rows, ORDER)
    else:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None]
        codes = ((some(encoding.codes)[:, None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(inside, -1)
    words = some(encoding.zeros, each) + np.uint32(encoding.added)
    zeros = _parts(words, bits, rows, ORDER if encoding.across else range(each))
    group = np.arange(inside) // encoding.group
    if encoding.groups is not None:
        group = strips.whole(encoding.groups, read).view(STORED[DType.I32]).astype(np.int64)
    scales = some(encoding.scales).astype(np.float32)
    return np.ascontiguousarray(((codes.astype(np.float32) - zeros.astype(np.float32)[group]) * scales[group]).T)


def _parts(words: Array, bits: int, columns: slice, order: Sequence[int]) -> Array:
    """Return these columns of the unpacked words, each word's parts in this order; the first word has column 0."""
    each = len(order)
    shifts = np.empty(each, np.uint32)
    shifts[list(order)] = np.arange(0, 32, bits)
    codes = ((words[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(len(words), -1)
    begin = columns.start % each
    return codes[:, begin : begin + columns.stop - columns.start]
