"""Reading rows of stored tensors, from any number of files and threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.stored import fill
from lora_tool.tensors import StoredTensor
from lora_tool.verification.elements import Array, Bytes, decode

Rows = Sequence[tuple[int, int]]
"""Ranges of rows, first and last (not included)."""


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as rows of so many elements; a scalar is one row of one."""
    rows = shape[0] if shape else 1
    return rows, int(np.prod(shape[1:], dtype=np.int64)) if shape else 1


class Files(OpenFiles):
    """Files open for reading: opened when they are read, a bounded number. A context manager, safe for threads."""

    def __init__(self) -> None:
        super().__init__(lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))

    def read(self, tensor: StoredTensor, start: int, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of the tensor from its byte `start`. Raises `SourceChanged` where the file ends early."""
        out = np.empty(nbytes, np.uint8)
        fill(out.data, tensor, start, self.read_exactly)
        return out

    def rows(self, tensor: StoredTensor, rows: Rows) -> Bytes:
        """Return the bytes of the ranges of rows, one after the other."""
        row_bytes = rows_and_columns(tensor.shape)[1] * tensor.dtype.bits // 8
        out = np.empty(sum(last - first for first, last in rows) * row_bytes, np.uint8)
        at = 0
        for first, last in rows:
            nbytes = (last - first) * row_bytes
            fill(out[at : at + nbytes].data, tensor, first * row_bytes, self.read_exactly)
            at += nbytes
        return out

    def matrix(self, tensor: StoredTensor, rows: Rows | None, wide: np.dtype[Any]) -> Array:
        """Return ranges of rows (all without `rows`) as numbers, [rows, columns]."""
        height, width = rows_and_columns(tensor.shape)
        return decode(self.rows(tensor, rows or [(0, height)]), tensor.dtype, wide).reshape(-1, width)
