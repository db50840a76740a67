"""Columns of matrices that lie on disk row by row: read for many rows of the decoded weight at once, and kept.

Some formats pack a weight along its inputs, or store it transposed: a row of the weight is a column there. Whoever goes
through such a weight row after row would read all of it for each block of rows.
"""

from __future__ import annotations

import threading

import numpy as np

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.quantised.arrays import Bytes, ReadRows, bytes_of

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
