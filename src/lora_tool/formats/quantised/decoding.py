"""The numbers that quantised weights stand for, in numpy, a few rows at a time: what a writer computes with.

Bit for bit what the library of each format computes on a CPU: transformers 5.23 (`Fp8Dequantize`,
`convert_moe_packed_tensors`), bitsandbytes 0.50 (`dequantize_4bit`, `dequantize_blockwise`, LLM.int8()),
compressed-tensors 0.20 (`decompress`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lora_tool.exhaustive import assert_never
from lora_tool.formats.quantised.encodings import (
    ORDER,
    Bnb4,
    BnbInt8,
    ColumnIntegers,
    Encoding,
    Fp4,
    NestedScales,
    PackedIntegers,
    RoundedAs,
    Tiled,
)
from lora_tool.formats.quantised.numpy_types import F32, STORED, Array, Read
from lora_tool.formats.quantised.rounded_as import rounded_as
from lora_tool.tensors import DType, StoredTensor

_SEVENTH = np.float32(1 / 127)
_ONE = np.float32(1)
_NIBBLE = 4
_BYTE = 8
_MATRIX = 2
_STRIP_BYTES = 1 << 20
"""Bytes of rows that are in memory together where some of their columns are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Rows of codes with their scales: value = (what the code stands for · the scale of its group) · `again`, float32."""

    codes: NDArray[np.uint8]
    """[rows, bytes], of which each is one code or two."""
    table: F32
    """What each byte stands for, [256, codes of a byte]."""
    scales: F32
    """[rows, groups], or one row for all."""
    group: int
    """Columns with one scale, an even number where a byte is two codes; the last group may have fewer."""
    columns: int
    again: np.float32 = _ONE


class Arithmetic:
    """How codes become numbers, in numpy; whoever does it faster gives the same bits."""

    def scale(self, part: Scaled, out: F32) -> None:
        """Write the values of `part` to `out`, [rows, columns]."""
        # the numbers of a byte are looked up as one element: by rows of the table numpy is six times slower
        numbers = np.ascontiguousarray(part.table).view(f"u{part.table.shape[1] * 4}")[:, 0]
        if part.columns == part.table.shape[1] * part.codes.shape[1]:
            np.take(numbers, part.codes, out=out.view(numbers.dtype), mode="clip")
        else:
            np.copyto(out, np.take(numbers, part.codes).view(np.float32)[:, : part.columns])
        spread = part.scales if part.scales.shape[1] == 1 else np.repeat(part.scales, part.group, axis=1)
        np.multiply(out, spread[:, : part.columns], out=out)
        if part.again != 1:
            np.multiply(out, part.again, out=out)

    def rounded(self, values: F32, dtype: DType) -> Array:
        """Return float32 values rounded to a type."""
        return values.astype(STORED[dtype], copy=False)


_IN_NUMPY = Arithmetic()


def decoded(encoding: Encoding, first: int, last: int, read: Read, arithmetic: Arithmetic = _IN_NUMPY) -> Array:
    """Return rows `first` to `last` of what the encoding stands for, [rows, columns], in the type of its values.

    The rows of a stack of matrices are those of all, one after the other.
    """
    match encoding:
        case Tiled():
            values = _tiled(encoding, first, last, read, arithmetic)
        case BnbInt8():
            values = _bnb_int8(encoding, first, last, read, arithmetic)
        case Bnb4():
            values = _bnb4(encoding, first, last, read, arithmetic)
        case PackedIntegers():
            values = _packed(encoding, first, last, read, arithmetic)
        case Fp4():
            values = _fp4(encoding, first, last, read, arithmetic)
        case ColumnIntegers():
            values = _columns(encoding, first, last, read)
        case RoundedAs():
            values = rounded_as(encoding, first, last, read)
        case _:
            return assert_never(encoding)
    return arithmetic.rounded(values, encoding.spec.dtype)


def _rows(tensor: StoredTensor, first: int, last: int, read: Read) -> Array:
    """Return rows of a tensor, of all its matrices one after the other, [rows, columns]; a vector's are its elements."""
    shape = tensor.shape if len(tensor.shape) >= _MATRIX else (math.prod(tensor.shape), 1)
    row = shape[-1] * tensor.dtype.bits // 8
    return read(tensor, first * row, (last - first) * row).view(STORED[tensor.dtype]).reshape(last - first, -1)


def _numbers(tensor: StoredTensor, first: int, last: int, read: Read) -> F32:
    """Return elements of a flat tensor of numbers, or of a level table."""
    size = tensor.dtype.bits // 8
    return widened(read(tensor, first * size, (last - first) * size), tensor.dtype)


def widened(raw: NDArray[np.uint8], dtype: DType) -> F32:
    """Return stored scales as float32; those of eight bits without a sign are powers of two."""
    if dtype in (DType.U8, DType.F8_E8M0):
        return np.asarray(_powers()[raw])
    if dtype is DType.F8_E4M3:
        return np.asarray(_e4m3()[raw])
    return raw.view(STORED[dtype]).astype(np.float32)


@cache
def _e4m3() -> F32:
    """Return the value of each byte as F8_E4M3: looking up is six times faster than converting."""
    return np.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@cache
def _powers() -> F32:
    """Return the value of each byte as E8M0."""
    return np.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@cache
def _e2m1() -> F32:
    """Return the two values of each byte as E2M1, the low half first, [256, 2]."""
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([half, -half])
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1)


@cache
def _signed(bits: int) -> F32:
    """Return what the codes of each byte stand for, the lowest bits first: eight bits in two's complement, four less 8."""
    byte = np.arange(256)
    if bits == _NIBBLE:
        return np.stack([byte & 15, byte >> 4], axis=1).astype(np.float32) - np.float32(8)
    return byte.astype(np.int8).astype(np.float32)[:, None]


def _tiled(encoding: Tiled, first: int, last: int, read: Read, arithmetic: Arithmetic) -> F32:
    table = _e4m3()[:, None] if encoding.codes.dtype is DType.F8_E4M3 else _signed(_BYTE)
    height, width = encoding.spec.shape[-2:]
    codes = _bytes(encoding.codes, width, first, last, read)
    values = np.empty(codes.shape, np.float32)
    rows, columns = encoding.tile
    across, down = -(-width // columns), -(-height // rows)
    for top, bottom in _stretches(first, last, height, rows):
        at = (top // height) * down + (top % height) // rows
        count = bottom - top if rows == 1 else 1
        scales = _numbers(encoding.scales, at * across, (at + count) * across, read).reshape(count, across)
        some = slice(top - first, bottom - first)
        part = Scaled(codes=codes[some], table=table, scales=scales, group=columns, columns=width)
        arithmetic.scale(part, values[some])
    return values


def _stretches(first: int, last: int, height: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of rows `first` to `last` that have one row of scales, or of matrices where a row has its own."""
    while first < last:
        matrix = first - first % height
        end = matrix + height if rows == 1 else min(matrix + ((first - matrix) // rows + 1) * rows, matrix + height)
        yield first, min(end, last)
        first = end


def _bnb_int8(encoding: BnbInt8, first: int, last: int, read: Read, arithmetic: Arithmetic) -> F32:
    width = encoding.spec.shape[-1]
    largest = _numbers(encoding.largest, first, last, read)[:, None]
    codes = _bytes(encoding.codes, width, first, last, read)
    values = np.empty(codes.shape, np.float32)
    part = Scaled(codes=codes, table=_signed(_BYTE), scales=largest, group=width, columns=width, again=_SEVENTH)
    arithmetic.scale(part, values)
    return values


def _bnb4(encoding: Bnb4, first: int, last: int, read: Read, arithmetic: Arithmetic) -> F32:
    width, block = encoding.spec.shape[-1], encoding.block
    begin, end = first * width, last * width
    levels = _numbers(encoding.levels, 0, 16, read)
    pairs = np.stack([np.repeat(levels, 16), np.tile(levels, 16)], axis=1)  # of each byte, the high half first
    blocks = range(begin // block, -(-end // block))
    start = blocks.start * block
    codes = read(encoding.codes, start // 2, -(-end // 2) - start // 2)[None]
    scales = _bnb_scales(encoding.scales, blocks, read)[None]
    values = np.empty((1, end - start), np.float32)
    part = Scaled(codes=codes, table=pairs, scales=scales, group=block, columns=end - start)
    arithmetic.scale(part, values)
    return values[0, begin - start :].reshape(last - first, width)


def _bnb_scales(scales: StoredTensor | NestedScales, blocks: range, read: Read) -> F32:
    if isinstance(scales, StoredTensor):
        return _numbers(scales, blocks.start, blocks.stop, read)
    codes = read(scales.codes, blocks.start, len(blocks))
    outer = range(blocks.start // scales.block, -(-blocks.stop // scales.block))
    largest = np.repeat(_numbers(scales.scales, outer.start, outer.stop, read), scales.block)
    levels = _numbers(scales.levels, 0, 256, read)
    found = levels[codes] * largest[blocks.start - outer.start * scales.block :][: len(blocks)]
    return np.asarray(found + np.float32(scales.offset))


def _packed(encoding: PackedIntegers, first: int, last: int, read: Read, arithmetic: Arithmetic) -> F32:
    width = encoding.spec.shape[-1]
    scales = _numbers_of_rows(encoding.scales, first, last, read)
    if encoding.bits == _NIBBLE and encoding.zeros is None and (encoding.group % 2 == 0 or scales.shape[1] == 1):
        raw = _bytes(encoding.codes, 4 * encoding.codes.shape[-1], first, last, read)
        values = np.empty((last - first, width), np.float32)
        part = Scaled(codes=raw, table=_signed(_NIBBLE), scales=scales, group=encoding.group, columns=width)
        arithmetic.scale(part, values)
        return values
    codes = _unpacked(_rows(encoding.codes, first, last, read), encoding.bits, width).astype(np.float32)
    codes -= np.float32(1 << (encoding.bits - 1))
    if encoding.zeros is not None:
        zeros = _zeros(encoding.zeros, encoding.bits, first, last, scales.shape[1], read)
        codes -= np.repeat(zeros, encoding.group, axis=1)[:, :width]
    return np.asarray(codes * np.repeat(scales, encoding.group, axis=1)[:, :width])


def _numbers_of_rows(tensor: StoredTensor, first: int, last: int, read: Read) -> F32:
    """Return rows of scales, [rows, groups]; one scale for all is that of each row."""
    if math.prod(tensor.shape) == 1:
        return np.repeat(_numbers(tensor, 0, 1, read)[:, None], last - first, axis=0)
    groups = tensor.shape[-1] if len(tensor.shape) >= _MATRIX else 1
    return _numbers(tensor, first * groups, last * groups, read).reshape(last - first, groups)


def _zeros(zeros: StoredTensor, bits: int, first: int, last: int, groups: int, read: Read) -> F32:
    if zeros.dtype is DType.I8:
        return _rows(zeros, first, last, read).astype(np.float32)
    # the stream of each column begins anew, so its words are those of rows above
    words = _rows(zeros, 0, zeros.shape[0], read)
    rows = zeros.shape[0] * 32 // bits
    found = _unpacked(np.ascontiguousarray(words.T), bits, rows).T[first:last, :groups]
    return found.astype(np.float32) - np.float32(1 << (bits - 1))


def _unpacked(words: Array, bits: int, count: int) -> Array:
    """Return the first `count` codes in each row of 32-bit words, the lowest bits first."""
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        mask = np.uint32((1 << bits) - 1)
        return np.asarray((words[:, :, None] >> shifts) & mask).reshape(len(words), -1)[:, :count]
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    weights = (1 << np.arange(bits)).astype(np.uint32)
    return np.asarray(stream.reshape(len(words), count, bits) @ weights)


def _fp4(encoding: Fp4, first: int, last: int, read: Read, arithmetic: Arithmetic) -> F32:
    overall = None if encoding.overall is None else _numbers(encoding.overall, 0, 1, read)[0]
    if not encoding.transposed:
        return _fp4_rows(encoding, first, last, overall, read, arithmetic)
    inside, outputs = encoding.spec.shape[-2:]
    made = []
    while first < last:
        matrix, top = divmod(first, inside)
        bottom = min(inside, top + last - first)
        made.append(_fp4_columns(encoding, matrix * outputs, outputs, slice(top, bottom), read, arithmetic))
        first += bottom - top
    return made[0] if len(made) == 1 else np.concatenate(made)


def _fp4_rows(
    encoding: Fp4, first: int, last: int, overall: np.float32 | None, read: Read, arithmetic: Arithmetic
) -> F32:
    width = encoding.spec.shape[-1]
    codes = _bytes(encoding.codes, width // 2, first, last, read)
    groups = width // encoding.group
    scales = widened(_bytes(encoding.scales, groups, first, last, read), encoding.scales.dtype)
    if overall is not None:
        scales = scales / overall if encoding.divides else scales * overall
    return _of_halves(encoding, codes, scales, arithmetic)


def _of_halves(encoding: Fp4, codes: NDArray[np.uint8], scales: F32, arithmetic: Arithmetic) -> F32:
    values = np.empty((codes.shape[0], 2 * codes.shape[1]), np.float32)
    part = Scaled(codes=codes, table=_e2m1(), scales=scales, group=encoding.group, columns=values.shape[1])
    arithmetic.scale(part, values)
    return values


def _fp4_columns(encoding: Fp4, row: int, rows: int, columns: slice, read: Read, arithmetic: Arithmetic) -> F32:
    """Return columns of the matrix on disk that begins at a row of all, as rows."""
    inside, group = encoding.spec.shape[-2], encoding.group
    aligned = slice(columns.start // group, -(-columns.stop // group))
    scales = _strip(encoding.scales, inside // group, (row, row + rows), aligned, read)
    half = group // 2
    some = slice(aligned.start * half, aligned.stop * half)
    codes = _strip(encoding.codes, inside // 2, (row, row + rows), some, read)
    values = _of_halves(encoding, codes, widened(scales, encoding.scales.dtype), arithmetic)
    begin = columns.start - aligned.start * group
    return np.ascontiguousarray(values[:, begin : begin + columns.stop - columns.start].T)


def _bytes(tensor: StoredTensor, width: int, first: int, last: int, read: Read) -> NDArray[np.uint8]:
    """Return rows of so many bytes, whatever shape the tensor is given on disk."""
    return read(tensor, first * width, (last - first) * width).reshape(last - first, width)


def _strip(tensor: StoredTensor, width: int, rows: tuple[int, int], columns: slice, read: Read) -> NDArray[np.uint8]:
    """Return these bytes of rows of `width` bytes: rows are read whole, `_STRIP_BYTES` at a time, whatever there are."""
    first, last = rows
    out = np.empty((last - first, columns.stop - columns.start), np.uint8)
    step = max(1, _STRIP_BYTES // width)
    for at in range(first, last, step):
        end = min(at + step, last)
        out[at - first : end - first] = _bytes(tensor, width, at, end, read)[:, columns]
    return out


def _some_columns(tensor: StoredTensor, columns: slice, read: Read) -> Array:
    """Return columns of a stored matrix."""
    (height, width), size = tensor.shape, tensor.dtype.bits // 8
    inside = slice(columns.start * size, columns.stop * size)
    return _strip(tensor, width * size, (0, height), inside, read).view(STORED[tensor.dtype])


def _columns(encoding: ColumnIntegers, first: int, last: int, read: Read) -> F32:
    """Return columns of the matrix on disk as rows."""
    inside, bits = encoding.spec.shape[-1], encoding.bits
    if encoding.across:
        codes = _across(encoding.codes, bits, slice(first, last), ORDER, read)
    else:
        words = _some_columns(encoding.codes, slice(first, last), read)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None]
        codes = ((words[:, None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(inside, -1)
    order = ORDER if encoding.across else range(32 // bits)
    zeros = _across(encoding.zeros, bits, slice(first, last), order, read, encoding.added)
    group = np.arange(inside) // encoding.group
    if encoding.groups is not None:
        group = _rows(encoding.groups, 0, inside, read).reshape(-1).astype(np.int64)
    scales = _some_columns(encoding.scales, slice(first, last), read).astype(np.float32)
    return np.ascontiguousarray(((codes.astype(np.float32) - zeros.astype(np.float32)[group]) * scales[group]).T)


def _across(words: StoredTensor, bits: int, columns: slice, order: Sequence[int], read: Read, added: int = 0) -> Array:
    """Return these columns of what rows of words hold, each word's parts in this order; `added` is added to the words."""
    each = len(order)
    some = _some_columns(words, slice(columns.start // each, -(-columns.stop // each)), read) + np.uint32(added)
    shifts = np.empty(each, np.uint32)
    shifts[list(order)] = np.arange(0, 32, bits)
    codes = ((some[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(len(some), -1)
    begin = columns.start % each
    return codes[:, begin : begin + columns.stop - columns.start]
