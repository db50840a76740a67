"""Where the scales of a quantised weight are: which rows and columns, or values of the flattened weight, share one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeGuard

from msgspec import Struct

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import BnbInt8, Encoding, OffsetIntegers, PackedIntegers, Tiled

Requantisable = Tiled | BnbInt8 | OffsetIntegers | PackedIntegers
"""What merged numbers can be stored as again: codes of eight bits, each times the scale of its tile; see `is_requantisable`."""

INT8_MOST, _E4M3_MOST = 127.0, 448.0
"""The largest codes."""
WORD = 4
"""Codes of eight bits in a word."""
_BYTE = 8


class Grid(Struct, frozen=True, kw_only=True):
    """The tiles of a weight: `rows` of all its matrices, one after the other, each of `height` rows."""

    rows: int
    width: int
    height: int
    tile: tuple[int, int]
    together: int = 1
    """Rows of scales that are stored together."""

    @property
    def across(self) -> int:
        """Tiles across the matrix, which is the number of scales in a row of scales."""
        return -(-self.width // self.tile[1])

    @property
    def down(self) -> int:
        """Rows of scales, of all matrices."""
        return self.rows // self.height * self._of_matrix

    @property
    def _of_matrix(self) -> int:
        return -(-self.height // self.tile[0])

    def rows_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the rows of numbers, first and last, that the rows `first` to `last` of scales are for."""
        return self._top(first), self._top(last)

    def scales_at(self, row: int) -> int:
        """Return the row of scales that a row of numbers has."""
        matrix, inside = divmod(row, self.height)
        return matrix * self._of_matrix + inside // self.tile[0]

    def _top(self, at: int) -> int:
        matrix, tile = divmod(at, self._of_matrix)
        return matrix * self.height + tile * self.tile[0]

    def parts(self, first: int, last: int, scales: int) -> Iterator[tuple[slice, slice]]:
        """Yield rows from `first` to `last`, counted from `first`, with their rows of scales, counted from row
        `scales`: rows that share one, or all where each has its own.
        """
        if self.tile[0] == 1:
            yield slice(0, last - first), slice(first - scales, last - scales)
            return
        at = scales
        while self._top(at) < last:
            top, bottom = max(self._top(at), first), min(self._top(at + 1), last)
            if top < bottom:
                yield slice(top - first, bottom - first), slice(at - scales, at - scales + 1)
            at += 1

    def stretches(self, first: int, last: int, weights: int) -> Iterator[tuple[int, int]]:
        """Yield rows of scales from `first` to `last`, whose tiles have about so many weights together, at least one row."""
        one = self._of_matrix == 1
        each = max(1, weights // ((self.height if one else self.tile[0]) * self.width))
        each = -(-each // self.together) * self.together
        while first < last:
            end = min(first + each, last)
            if not one:  # the last tile of a matrix may be cut off
                end = min(end, (first // self._of_matrix + 1) * self._of_matrix)
            yield first, end
            first = end


def is_requantisable(encoding: Encoding | None) -> TypeGuard[Requantisable]:
    """Return whether merged numbers can be stored so again: codes in words must be whole bytes, their groups in order."""
    if isinstance(encoding, PackedIntegers):
        zeros, scales = encoding.zeros, encoding.scales.spec.numel
        of_rows = zeros is not None and scales == 1 < zeros.spec.numel  # which no scale of a row can be raised for
        return (encoding.bits, encoding.groups) == (_BYTE, None) and not of_rows
    return isinstance(encoding, BnbInt8) or (isinstance(encoding, Tiled | OffsetIntegers) and encoding.bits >= _BYTE)


def grid_of(encoding: Requantisable) -> Grid:
    """Return where the scales of a weight are."""
    *lead, height, width = encoding.spec.shape
    match encoding:
        case BnbInt8():
            tile = 1, width
        case PackedIntegers():
            tile = (height, width) if encoding.scales.spec.numel == 1 else (1, encoding.group)
        case Tiled() | OffsetIntegers():
            tile = encoding.tile
    zeros = zeros_of(encoding)
    together = 1 if zeros is None or zeros.dtype is DType.I8 else WORD
    return Grid(rows=math.prod(lead) * height, width=width, height=height, tile=tile, together=together)


def type_of_codes(encoding: Requantisable) -> DType:
    """Return the type of the unpacked codes."""
    return DType.I8 if isinstance(encoding, PackedIntegers) else encoding.codes.dtype


def scales_of(encoding: Requantisable) -> StoredTensor:
    """Return the tensor that holds the scales."""
    return encoding.largest if isinstance(encoding, BnbInt8) else encoding.scales


def zeros_of(encoding: Requantisable) -> StoredTensor | None:
    """Return the tensor that holds the zero points; None where all are 0."""
    return encoding.zeros if isinstance(encoding, OffsetIntegers | PackedIntegers) else None


def limits(encoding: Requantisable) -> tuple[float, float]:
    """Return the least and the largest code, as a number: bitsandbytes leaves int8's -128 out."""
    if type_of_codes(encoding) is DType.F8_E4M3:
        return -_E4M3_MOST, _E4M3_MOST
    return -INT8_MOST - (not isinstance(encoding, BnbInt8)), INT8_MOST
