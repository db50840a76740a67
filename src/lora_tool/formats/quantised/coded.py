"""Rows of quantised weights as codes with their scales: all formats whose codes lie in the order of the matrix are these.

value = (level of the code · scale of its group) · `again`, in float32, rounded to the type of the weight.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from msgspec import Struct

from lora_tool.core.choices import TextEnum
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.arrays import F32, INT8_STEP, MATRIX, Bytes, ReadRows, bytes_of, e4m3, numbers, widened
from lora_tool.formats.quantised.encodings import Bnb4, BnbInt8, Encoding, Fp4, NestedScales, PackedIntegers, Tiled

_ONE = np.float32(1)
_NIBBLE = 4


@enum.unique
class Code(TextEnum):
    """How a byte encodes values."""

    E4M3 = "e4m3"
    INT8 = "int8"
    HALVES = "halves"
    """Two codes of four bits."""


class Table(Struct, frozen=True, kw_only=True):
    """Byte → the value it encodes, or the values of two adjacent columns."""

    code: Code
    numbers: F32
    """[256, numbers of a byte]"""


class Scaled(Struct, frozen=True, kw_only=True):
    """Rows of codes with their scales."""

    codes: Bytes
    """[rows, bytes]"""
    table: Table
    scales: F32
    """[rows of scales, groups]"""
    group: int
    """Columns with one scale, an even number where a byte is two codes; the last group may have fewer."""
    columns: int
    tall: int = 1
    """Rows of codes that have one row of scales."""
    above: int = 0
    """How many of those that have the first row of scales lie above the first row of codes."""
    again: np.float32 = _ONE
    as_stored: bool = True
    """Whether the bytes of `codes` are those on disk."""

    def stretches(self) -> Iterator[tuple[slice, F32]]:
        """Yield rows with their scales: rows that share theirs, or all where each has its own."""
        if self.tall == 1:
            yield slice(0, len(self.codes)), self.scales
            return
        for at in range(len(self.scales)):
            top = at * self.tall - self.above
            yield slice(max(top, 0), min(top + self.tall, len(self.codes))), self.scales[at : at + 1]


def coded(encoding: Encoding, first: int, last: int, read: ReadRows) -> tuple[Scaled, ...] | None:
    """Return rows `first` to `last` of the decoded weight, one part after the other.

    The rows of a stack of matrices are those of all. None where codes lie in another order, or need other arithmetic.
    """
    match encoding:
        case Tiled():
            return tuple(_tiled(encoding, first, last, read))
        case BnbInt8():
            width = encoding.spec.shape[-1]
            largest = numbers(encoding.largest, first, last, read)[:, None]
            codes = bytes_of(encoding.codes, width, first, last, read)
            return (Scaled(codes=codes, table=int8(), scales=largest, group=width, columns=width, again=INT8_STEP),)
        case Bnb4() if encoding.spec.shape[-1] % encoding.block == 0:
            return (_bnb4(encoding, first, last, read),)
        case PackedIntegers(bits=4 | 8, zeros=None, groups=None):
            return _packed(encoding, first, last, read)
        case Fp4(transposed=False, below=False):
            return (_fp4(encoding, first, last, read),)
        case _:
            return None


def _tiled(encoding: Tiled, first: int, last: int, read: ReadRows) -> Iterator[Scaled]:
    """Yield the rows of each matrix."""
    height, width = encoding.spec.shape[-2:]
    rows, columns = encoding.tile
    across, down = -(-width // columns), -(-height // rows)
    table = eight_bits() if encoding.codes.dtype is DType.F8_E4M3 else int8()
    while first < last:
        matrix, top = divmod(first, height)
        bottom = min(height, top + last - first)
        begin, end = matrix * down + top // rows, matrix * down + -(-bottom // rows)
        yield Scaled(
            codes=bytes_of(encoding.codes, width, first, first + bottom - top, read),
            table=table,
            scales=numbers(encoding.scales, begin * across, end * across, read).reshape(-1, across),
            group=columns,
            columns=width,
            tall=rows,
            above=top % rows,
        )
        first += bottom - top


def _bnb4(encoding: Bnb4, first: int, last: int, read: ReadRows) -> Scaled:
    width = encoding.spec.shape[-1]
    each = width // encoding.block
    return Scaled(
        codes=bytes_of(encoding.codes, width // 2, first, last, read),
        table=levels_of(encoding, read),
        scales=bnb_scales(encoding.scales, range(first * each, last * each), read).reshape(-1, each),
        group=encoding.block,
        columns=width,
    )


def levels_of(encoding: Bnb4, read: ReadRows) -> Table:
    """Return the two levels of each byte, that of the high half first."""
    levels = numbers(encoding.levels, 0, 16, read)
    return Table(code=Code.HALVES, numbers=np.stack([np.repeat(levels, 16), np.tile(levels, 16)], axis=1))


def bnb_scales(scales: StoredTensor | NestedScales, blocks: range, read: ReadRows) -> F32:
    """Return the scales of neighbouring blocks."""
    if isinstance(scales, StoredTensor):
        return numbers(scales, blocks.start, blocks.stop, read)
    codes = read(scales.codes, blocks.start, len(blocks))
    outer = range(blocks.start // scales.block, -(-blocks.stop // scales.block))
    largest = np.repeat(numbers(scales.scales, outer.start, outer.stop, read), scales.block)
    levels = numbers(scales.levels, 0, 256, read)
    found = levels[codes] * largest[blocks.start - outer.start * scales.block :][: len(blocks)]
    return np.asarray(found + np.float32(scales.offset))


def _packed(encoding: PackedIntegers, first: int, last: int, read: ReadRows) -> tuple[Scaled] | None:
    one = encoding.scales.spec.numel == 1
    scales = numbers(encoding.scales, 0, 1, read)[None] if one else scales_of_rows(encoding.scales, first, last, read)
    if encoding.group % 2 and scales.shape[1] > 1:
        return None
    codes = bytes_of(encoding.codes, 4 * encoding.codes.shape[-1], first, last, read)
    in_halves, width = encoding.bits == _NIBBLE, encoding.spec.shape[-1]
    part = Scaled(
        codes=codes if in_halves else signed(codes),
        table=_int4() if in_halves else int8(),
        scales=scales,
        group=encoding.group,
        columns=width,
        tall=encoding.spec.shape[0] if one else 1,
        above=first if one else 0,
        as_stored=in_halves,
    )
    return (part,)


def signed(codes: Bytes) -> Bytes:
    """Return bytes that are stored plus 128 in two's complement, and the other way round, as a new array."""
    return np.bitwise_xor(codes, np.uint8(128))


def scales_of_rows(tensor: StoredTensor, first: int, last: int, read: ReadRows) -> F32:
    """Return rows of scales, [rows, groups]; one scale for all is that of each row."""
    if math.prod(tensor.shape) == 1:
        return np.repeat(numbers(tensor, 0, 1, read)[:, None], last - first, axis=0)
    groups = tensor.shape[-1] if len(tensor.shape) >= MATRIX else 1
    return numbers(tensor, first * groups, last * groups, read).reshape(last - first, groups)


def _fp4(encoding: Fp4, first: int, last: int, read: ReadRows) -> Scaled:
    width = encoding.spec.shape[-1]
    scales = fp4_scales(encoding, width // encoding.group, first, last, read)
    codes = bytes_of(encoding.codes, width // 2, first, last, read)
    return Scaled(codes=codes, table=e2m1(), scales=scales, group=encoding.group, columns=width)


def fp4_scales(encoding: Fp4, across: int, first: int, last: int, read: ReadRows) -> F32:
    """Return rows of scales, [rows, across], times their common factor."""
    scales = widened(bytes_of(encoding.scales, across, first, last, read), encoding.scales.dtype)
    if encoding.overall is None:
        return scales
    overall = numbers(encoding.overall, 0, 1, read)[0]
    return np.asarray(scales / overall if encoding.divides else scales * overall)


@cache
def eight_bits() -> Table:
    """Return the value of each byte as F8_E4M3."""
    return Table(code=Code.E4M3, numbers=e4m3()[:, None])


@cache
def int8() -> Table:
    """Return the value of each byte in two's complement."""
    return Table(code=Code.INT8, numbers=np.arange(256).astype(np.int8).astype(np.float32)[:, None])


@cache
def _int4() -> Table:
    """Return the two values of each byte, the low half first, each stored plus 8."""
    byte = np.arange(256)
    halves = np.stack([byte & 15, byte >> _NIBBLE], axis=1).astype(np.float32)
    return Table(code=Code.HALVES, numbers=halves - np.float32(8))


@cache
def e2m1() -> Table:
    """Return the two values of each byte as E2M1, the low half first."""
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([half, -half])
    byte = np.arange(256)
    return Table(code=Code.HALVES, numbers=np.stack([values[byte & 15], values[byte >> _NIBBLE]], axis=1))
