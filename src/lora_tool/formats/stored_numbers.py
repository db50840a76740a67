"""The numbers that stored tensors hold, as numpy has them: whole, in blocks, by rows, widened to float64.

Files are mapped, and widened a block at a time.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lora_tool.core.tensors import DType, Span, StoredTensor
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.stored import as_in_the_file, fill, read_columns, read_into, read_part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_tool.formats.open_files import OpenFiles, Room


Matrix = npt.NDArray[np.float64]

STORED = {DType.BF16: "<u2", DType.F16: "<f2", DType.F32: "<f4", DType.F64: "<f8"}
"""numpy's type of the stored elements; bfloat16, which it lacks, as its bits."""
READABLE = frozenset(STORED)
"""The dtypes that can be measured."""

BLOCK = 1 << 20
"""Elements that are widened at a time."""


def bfloat16() -> np.dtype[Any]:
    """Return ml_dtypes' type, which numpy lacks. The package takes 3 MB, and is imported where it is needed."""
    import ml_dtypes

    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return kind


def values(tensor: StoredTensor) -> npt.NDArray[np.generic]:
    """Return the stored elements, flat: mapped from the file where they lie in it as they are meant. Raises `OSError`.

    bfloat16, which numpy lacks, comes as uint16; `widened` makes numbers of it. The dtype must be in `READABLE`.
    """
    kind = np.dtype(STORED[tensor.dtype])
    if all(type(span) is Span for span in tensor.spans):
        return _mapped(tensor, kind)
    return np.frombuffer(read_part(tensor, 0, tensor.nbytes), kind)


def numbers(tensor: StoredTensor) -> Matrix:
    """Return the whole tensor in float64, whatever spans hold it, decoded where it is quantised.

    Raises `SourceChanged`, `CorruptFile`.
    """
    return widened(np.frombuffer(read_part(tensor, 0, tensor.nbytes), STORED[tensor.dtype]), tensor.dtype).reshape(
        tensor.shape
    )


def _mapped(tensor: StoredTensor, kind: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    parts = []
    for span in tensor.spans:
        descriptor = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            begin = span.offset - span.offset % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(descriptor, span.offset + span.nbytes - begin, access=mmap.ACCESS_READ, offset=begin)
        finally:
            os.close(descriptor)
        parts.append(np.frombuffer(mapped, dtype=kind, count=span.nbytes // kind.itemsize, offset=span.offset - begin))
    if not parts:
        return np.empty(0, kind)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def widened(block: npt.NDArray[np.generic], dtype: DType) -> Matrix:
    """Return stored elements of `dtype` as float64, exactly."""
    # bfloat16 is the upper half of a float32
    stored = (block.astype(np.uint32) << np.uint32(16)).view(np.float32) if dtype is DType.BF16 else block
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return stored.astype(np.float64)


def rounded(exact: Matrix, dtype: DType) -> Matrix:
    """Return the values rounded to `dtype` and widened again."""
    kind = bfloat16() if dtype is DType.BF16 else np.dtype(STORED[dtype])
    with np.errstate(over="ignore"):  # infinities are shown as such
        return exact.astype(kind).astype(np.float64)


def stored_blocks(tensor: StoredTensor) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the stored elements in order, flat, `BLOCK` at a time; quantised weights decoded.

    Raises `OSError`, for quantised weights `SourceChanged`.
    """
    if encoding_of(tensor) is None:
        held = values(tensor)
        yield from (held[at : at + BLOCK] for at in range(0, held.size, BLOCK))
        return
    kind, step = np.dtype(STORED[tensor.dtype]), BLOCK * tensor.dtype.bits // 8
    for at in range(0, tensor.nbytes, step):
        yield np.frombuffer(read_part(tensor, at, min(step, tensor.nbytes - at)), kind)


def row_blocks(tensor: StoredTensor, step: int) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the stored rows of a matrix, `step` at a time, in one array that is used again for the next.

    They are read, not mapped: pages of a mapped file count as memory. Raises `SourceChanged`, `CorruptFile`.
    """
    height, width = tensor.shape
    held = np.empty((min(step, height), width), STORED[tensor.dtype])
    for at in range(0, height, step):
        rows = held[: min(step, height - at)]
        read_into(tensor, at * width * held.itemsize, rows.reshape(-1).view(np.uint8).data)
        yield rows


def blocks(tensor: StoredTensor) -> Iterator[Matrix]:
    """Yield the tensor's elements in order as float64, flat, in blocks. Raises as `stored_blocks`."""
    return (widened(block, tensor.dtype) for block in stored_blocks(tensor))


def square_sum(tensor: StoredTensor) -> float:
    """Return the sum of the squares of all elements, ‖W‖². Raises `OSError`."""
    with np.errstate(all="ignore"):  # NaN and infinities are shown as such
        return math.fsum(float(np.dot(block, block)) for block in blocks(tensor))


def raw_blocks(tensor: StoredTensor) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the tensor's bytes in order, of whatever type it is. Raises `OSError`."""
    stored = _mapped(tensor, np.dtype(np.uint8))
    for at in range(0, stored.size, BLOCK):
        yield stored[at : at + BLOCK]


# Rows of LoRA factors in the order of the weight: B's rows, and those of A transposed, however the file stores them.
#
# Nothing is transposed in memory: a factor stored the other way comes as a view with swapped strides.


PIECE_BYTES = 2 << 20
"""Bytes of all parts that a worker reads at once: whole factors at usual ranks, large reads of bigger ones."""


def pieces(parts: Sequence[StoredTensor], files: OpenFiles, room: Room, *, below: bool) -> Iterator[list[NDArray[Any]]]:
    """Yield rows of matrices that are equally high, or, `below`, of their transposed, in order.

    They are the stored bits, in `room` until the next piece: all rows in one piece where that is little. Raises
    `SourceChanged`, `CorruptFile`.
    """
    height = parts[0].shape[1 if below else 0]
    step = max(1, PIECE_BYTES // max(1, sum(part.nbytes for part in parts) // max(1, height)))
    for first in range(0, height, step):
        count = min(step, height - first)
        yield [
            _rows(part, first, count, files, room, f"part {number}", below=below) for number, part in enumerate(parts)
        ]


def _rows(
    part: StoredTensor, first: int, count: int, files: OpenFiles, room: Room, name: str, *, below: bool
) -> NDArray[Any]:
    """Return rows of a matrix, or, `below`, of its transposed."""
    part, transposed = as_in_the_file(part)
    kind = np.dtype(f"u{part.dtype.bits // 8}")
    if transposed is below:
        rows = room.of(name, (count, part.shape[1]), kind)
        fill(rows.reshape(-1).view(np.uint8).data, part, first * rows.strides[0], files.read_exactly)
        return rows
    columns = room.of(name, (part.shape[0], count), kind)
    if count == part.shape[1]:
        fill(columns.reshape(-1).view(np.uint8).data, part, 0, files.read_exactly)
    else:
        read_columns(columns, part, first, files)
    return columns.T
