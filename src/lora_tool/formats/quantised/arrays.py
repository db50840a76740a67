"""Stored elements as numpy arrays, for decoding, rounding and requantising, and their types."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lora_tool.core.tensors import DType, StoredTensor

Array = NDArray[Any]
F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]
ReadRows = Callable[[StoredTensor, int, int], Bytes]
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
MATRIX = 2
INT8_STEP = np.float32(1 / 127)
"""What one step of bitsandbytes' int8 codes stands for, as a share of the largest size in the row."""


def rows_of(tensor: StoredTensor, first: int, last: int, read: ReadRows) -> Array:
    """Return rows of a tensor, of all its matrices one after the other, [rows, columns]; a vector's are its elements."""
    shape = tensor.shape if len(tensor.shape) >= MATRIX else (math.prod(tensor.shape), 1)
    row = shape[-1] * tensor.dtype.bits // 8
    return read(tensor, first * row, (last - first) * row).view(STORED[tensor.dtype]).reshape(last - first, -1)


def bytes_of(tensor: StoredTensor, width: int, first: int, last: int, read: ReadRows) -> Bytes:
    """Return rows of so many bytes, whatever shape the tensor is given on disk."""
    return read(tensor, first * width, (last - first) * width).reshape(last - first, width)


def numbers(tensor: StoredTensor, first: int, last: int, read: ReadRows) -> F32:
    """Return elements of a flat tensor of numbers, or of a level table."""
    size = tensor.dtype.bits // 8
    return widened(read(tensor, first * size, (last - first) * size), tensor.dtype)


def widened(raw: Bytes, dtype: DType) -> F32:
    """Return stored scales as float32; those of eight bits without a sign are powers of two."""
    if dtype in (DType.U8, DType.F8_E8M0):
        return np.asarray(_powers()[raw])
    if dtype is DType.F8_E4M3:
        return np.asarray(e4m3()[raw])
    return raw.view(STORED[dtype]).astype(np.float32)


def wide(stored: Array, dtype: DType) -> F32:
    """Return stored scales of any shape as float32."""
    return widened(np.ascontiguousarray(stored).reshape(-1).view(np.uint8), dtype).reshape(stored.shape)


@cache
def e4m3() -> F32:
    """Return the value of each byte as F8_E4M3: looking up is six times faster than converting."""
    return np.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@cache
def _powers() -> F32:
    """Return the value of each byte as E8M0."""
    return np.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


# Columns of matrices that lie on disk row by row: read for many rows of the decoded weight at once, and kept.
#
# Some formats pack a weight along its inputs, or store it transposed: a row of the weight is a column there. Whoever goes
# through such a weight row after row would read all of it for each block of rows.


_TENSORS = 4
"""Of one weight: codes, scales, zeros and groups."""


class Strips(threading.local):
    """The columns that a thread has read last of the tensors of one weight."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._held: dict[str, tuple[StoredTensor, tuple[int, int], slice, Bytes]] = {}

    def columns(
        self, tensor: StoredTensor, width: int, rows: tuple[int, int], columns: slice, ahead: slice, read: ReadRows
    ) -> Bytes:
        """Return bytes `columns` of rows of `width` bytes; `ahead`, which they are among, is read and kept.

        With `keeps` false only the requested columns are read.
        """
        if not self._keeps:
            return columns_of(tensor, width, rows, columns, read)
        held = self._held.get(tensor.name)
        if held is None and len(self._held) == _TENSORS:
            self._held.clear()
        if (
            held is None
            or held[:2] != (tensor, rows)
            or not held[2].start <= columns.start <= columns.stop <= held[2].stop
        ):
            self._held.pop(tensor.name, None)
            held = self._held[tensor.name] = tensor, rows, ahead, columns_of(tensor, width, rows, ahead, read)
        return held[3][:, columns.start - held[2].start : columns.stop - held[2].start]

    def whole(self, tensor: StoredTensor, read: ReadRows) -> Bytes:
        """Return all bytes of a tensor."""
        every = slice(0, tensor.nbytes)
        return self.columns(tensor, tensor.nbytes, (0, 1), every, every, read).reshape(-1)


def columns_of(tensor: StoredTensor, width: int, rows: tuple[int, int], columns: slice, read: ReadRows) -> Bytes:
    """Return these bytes of rows of `width` bytes: nothing else is read."""
    first, last = rows
    if columns == slice(0, width):
        return bytes_of(tensor, width, first, last, read)
    out = np.empty((last - first, columns.stop - columns.start), np.uint8)
    for row in range(first, last):
        out[row - first] = read(tensor, row * width + columns.start, out.shape[1])
    return out
