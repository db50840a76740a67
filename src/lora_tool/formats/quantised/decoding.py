"""The numbers that quantised weights stand for, in numpy, a few rows at a time: what a writer computes with.

Bit for bit what the library of each format computes on a CPU: transformers 5.23 (`Fp8Dequantize`,
`convert_moe_packed_tensors`), bitsandbytes 0.50 (`dequantize_4bit`, `dequantize_blockwise`, LLM.int8()),
compressed-tensors 0.20 (`decompress`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

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
    Tiled,
)
from lora_tool.tensors import DType, StoredTensor

Array = NDArray[Any]
F32 = NDArray[np.float32]
Read = Callable[[StoredTensor, int, int], NDArray[np.uint8]]
"""Gives a tensor's bytes, so many from a byte."""

STORED: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F16: np.dtype("<f2"),
    DType.F32: np.dtype("<f4"),
    DType.F64: np.dtype("<f8"),
    DType.I8: np.dtype("i1"),
    DType.U8: np.dtype("u1"),
    DType.I32: np.dtype("<u4"),
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The numpy type of stored elements, of codes and scales among them."""
_SEVENTH = np.float32(1 / 127)
_MATRIX = 2


def decoded(encoding: Encoding, first: int, last: int, read: Read) -> Array:
    """Return rows `first` to `last` of what the encoding stands for, [rows, columns], in the type of its values.

    The rows of a stack of matrices are those of all, one after the other.
    """
    match encoding:
        case Tiled():
            values = _tiled(encoding, first, last, read)
        case BnbInt8():
            largest = _numbers(encoding.largest, first, last, read)
            values = (_codes(encoding, first, last, read) * largest[:, None]) * _SEVENTH
        case Bnb4():
            values = _bnb4(encoding, first, last, read)
        case PackedIntegers():
            values = _packed(encoding, first, last, read)
        case Fp4():
            values = _fp4(encoding, first, last, read)
        case ColumnIntegers():
            values = _columns(encoding, first, last, read)
        case _:
            return assert_never(encoding)
    return values.astype(STORED[encoding.spec.dtype], copy=False)


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


def _codes(encoding: Tiled | BnbInt8, first: int, last: int, read: Read) -> F32:
    stored = _rows(encoding.codes, first, last, read)
    if encoding.codes.dtype is DType.F8_E4M3:
        return np.take(_e4m3(), stored.view(np.uint8))
    return stored.astype(np.float32)


def _tiled(encoding: Tiled, first: int, last: int, read: Read) -> F32:
    values = _codes(encoding, first, last, read)
    height, width = encoding.spec.shape[-2:]
    rows, columns = encoding.tile
    across, down = -(-width // columns), -(-height // rows)
    for top, bottom in _stretches(first, last, height, rows):
        at = (top // height) * down + (top % height) // rows
        count = bottom - top if rows == 1 else 1
        scales = _numbers(encoding.scales, at * across, (at + count) * across, read).reshape(count, across)
        values[top - first : bottom - first] *= np.repeat(scales, columns, axis=1)[:, :width] if across > 1 else scales
    return values


def _stretches(first: int, last: int, height: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of rows `first` to `last` that have one row of scales, or of matrices where a row has its own."""
    while first < last:
        matrix = first - first % height
        end = matrix + height if rows == 1 else min(matrix + ((first - matrix) // rows + 1) * rows, matrix + height)
        yield first, min(end, last)
        first = end


def _bnb4(encoding: Bnb4, first: int, last: int, read: Read) -> F32:
    width = encoding.spec.shape[-1]
    begin, end = first * width, last * width
    levels = _numbers(encoding.levels, 0, 16, read)
    pairs = np.stack([np.repeat(levels, 16), np.tile(levels, 16)], axis=1)  # of each byte, the high half first
    raw = read(encoding.codes, begin // 2, -(-end // 2) - begin // 2)
    values = np.take(pairs, raw, axis=0).reshape(-1)[begin % 2 :][: end - begin]
    blocks = range(begin // encoding.block, -(-end // encoding.block))
    scales = _bnb_scales(encoding.scales, blocks, read)
    spread = np.repeat(scales, encoding.block)[begin - blocks.start * encoding.block :][: end - begin]
    return np.asarray(values * spread).reshape(last - first, width)


def _bnb_scales(scales: StoredTensor | NestedScales, blocks: range, read: Read) -> F32:
    if isinstance(scales, StoredTensor):
        return _numbers(scales, blocks.start, blocks.stop, read)
    codes = read(scales.codes, blocks.start, len(blocks))
    outer = range(blocks.start // scales.block, -(-blocks.stop // scales.block))
    largest = np.repeat(_numbers(scales.scales, outer.start, outer.stop, read), scales.block)
    levels = _numbers(scales.levels, 0, 256, read)
    found = levels[codes] * largest[blocks.start - outer.start * scales.block :][: len(blocks)]
    return np.asarray(found + np.float32(scales.offset))


def _packed(encoding: PackedIntegers, first: int, last: int, read: Read) -> F32:
    width = encoding.spec.shape[-1]
    scales = _numbers_of_rows(encoding.scales, first, last, read)
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


def _fp4(encoding: Fp4, first: int, last: int, read: Read) -> F32:
    overall = None if encoding.overall is None else _numbers(encoding.overall, 0, 1, read)[0]
    if not encoding.transposed:
        return _fp4_rows(encoding, first, last, overall, read)
    inside, outputs = encoding.spec.shape[-2:]
    made = []
    while first < last:
        matrix, top = divmod(first, inside)
        bottom = min(inside, top + last - first)
        made.append(_fp4_columns(encoding, matrix * outputs, outputs, slice(top, bottom), read))
        first += bottom - top
    return made[0] if len(made) == 1 else np.concatenate(made)


def _fp4_rows(encoding: Fp4, first: int, last: int, overall: np.float32 | None, read: Read) -> F32:
    width = encoding.spec.shape[-1]
    values = np.take(_e2m1(), _bytes(encoding.codes, width // 2, first, last, read), axis=0).reshape(last - first, -1)
    groups = width // encoding.group
    scales = widened(_bytes(encoding.scales, groups, first, last, read), encoding.scales.dtype)
    if overall is not None:
        scales = scales / overall if encoding.divides else scales * overall
    return np.asarray(values * np.repeat(scales, encoding.group, axis=1))


def _fp4_columns(encoding: Fp4, row: int, rows: int, columns: slice, read: Read) -> F32:
    """Return columns of the matrix on disk that begins at a row of all, as rows: it is read whole."""
    inside, group = encoding.spec.shape[-2], encoding.group
    aligned = slice(columns.start // group, -(-columns.stop // group))
    codes = _bytes(encoding.codes, inside // 2, row, row + rows, read)
    scales = _bytes(encoding.scales, inside // group, row, row + rows, read)[:, aligned]
    half = group // 2
    values = np.take(_e2m1(), codes[:, aligned.start * half : aligned.stop * half], axis=0).reshape(rows, -1)
    values = values * np.repeat(widened(scales, encoding.scales.dtype), group, axis=1)
    begin = columns.start - aligned.start * group
    return np.ascontiguousarray(values[:, begin : begin + columns.stop - columns.start].T)


def _bytes(tensor: StoredTensor, width: int, first: int, last: int, read: Read) -> NDArray[np.uint8]:
    """Return rows of so many bytes, whatever shape the tensor is given on disk."""
    return read(tensor, first * width, (last - first) * width).reshape(last - first, width)


def _columns(encoding: ColumnIntegers, first: int, last: int, read: Read) -> F32:
    """Return columns of the matrix on disk as rows; the codes of the whole matrix are read."""
    inside, bits = encoding.spec.shape[-1], encoding.bits
    words = _rows(encoding.codes, 0, encoding.codes.shape[0], read)
    if encoding.across:
        codes = _across(words, bits, slice(first, last), ORDER)
    else:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[None, :, None]
        codes = ((words[:, None, first:last] >> shifts) & np.uint32((1 << bits) - 1)).reshape(inside, -1)
    stored = _rows(encoding.zeros, 0, encoding.zeros.shape[0], read)
    zeros = _across(stored, bits, slice(first, last), ORDER if encoding.across else range(32 // bits))
    zeros = (zeros + np.uint32(encoding.added)) & np.uint32((1 << bits) - 1)
    group = np.arange(inside) // encoding.group
    if encoding.groups is not None:
        group = _rows(encoding.groups, 0, inside, read).reshape(-1).astype(np.int64)
    height, width = encoding.scales.shape
    scales = _numbers(encoding.scales, 0, height * width, read).reshape(height, width)[:, first:last]
    return np.ascontiguousarray(((codes.astype(np.float32) - zeros.astype(np.float32)[group]) * scales[group]).T)


def _across(words: Array, bits: int, columns: slice, order: Sequence[int]) -> Array:
    """Return these columns of what rows of words hold, each word's parts in this order."""
    each = len(order)
    some = words[:, columns.start // each : -(-columns.stop // each)]
    shifts = np.empty(each, np.uint32)
    shifts[list(order)] = np.arange(0, 32, bits)
    codes = ((some[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(len(words), -1)
    begin = columns.start % each
    return codes[:, begin : begin + columns.stop - columns.start]
