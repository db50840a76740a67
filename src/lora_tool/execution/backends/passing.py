"""Rows of W that the compiled kernel takes from file to file: read, changed and written in one call; and from memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.execution.kernels import bytes_of
from lora_tool.execution.output import WRITE_BYTES, write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.native.library import TYPES, Codes, Kernel, Storing
from lora_tool.native.rows import NativeArray, Terms

if TYPE_CHECKING:
    from lora_tool.formats.quantised.coded import Scaled


class _Passage(ctypes.Structure):
    """`struct passage` of `files.h`."""

    _fields_ = (
        ("begin", ctypes.c_int64),
        ("to", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("some", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("made", ctypes.c_void_p),
        ("codes", ctypes.POINTER(Codes)),
        ("storing", ctypes.POINTER(Storing)),
        ("source", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("source_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )


class FileRows(Struct, frozen=True, kw_only=True):
    """Rows `first` to `last` of W, which lie one after the other in a file: numbers, or codes."""

    path: Path
    begin: int
    """Where row `first` begins."""
    row_bytes: int
    first: int
    last: int
    columns: int
    dtype: DType
    coded: Scaled | None = None
    """The scales of codes; of the codes themselves nothing is read."""
    above: int = 0
    """How many rows of those that `coded` has lie above row `first`."""

    def part(self, first: int, last: int) -> FileRows:
        """Return some of the rows."""
        down = first - self.first
        begin, above = self.begin + down * self.row_bytes, self.above + down
        return replace(self, first=first, last=last, begin=begin, above=above)


def rows_in_file(sources: Sources, tensor: StoredTensor, first: int, last: int) -> FileRows | None:
    """Return rows of a weight where they lie; None where that is not in one piece of a file."""
    columns = tensor.spec.numel // tensor.shape[0] if tensor.shape else 1
    row_bytes = columns * tensor.dtype.bits // 8
    place, coded = sources.place(tensor, first * row_bytes, (last - first) * row_bytes), None
    if place is None and (found := sources.coded_in_file(tensor, first, last)) is not None:
        coded, place = found
        row_bytes = coded.codes.shape[1]
    if place is None:
        return None
    return FileRows(
        path=place[0],
        begin=place[1],
        row_bytes=row_bytes,
        first=first,
        last=last,
        columns=columns,
        dtype=tensor.dtype,
        coded=coded,
    )


class Memory(Struct, frozen=True, kw_only=True):
    """Memory of a block of rows as they are read, and as they are written: the same where both are of one size."""

    rows: int
    read: NativeArray
    made: NativeArray


class WriteTarget(Struct, frozen=True, kw_only=True):
    """A descriptor, where in its file the rows begin that are written, their type, and how many bytes at once."""

    descriptor: int
    begin: int
    dtype: DType
    at_once: int
    storing: Storing | None = None
    """How codes are stored again: of the type of those that are read."""


def passed_on(kernel: Kernel, rows: FileRows, source: int, target: WriteTarget, memory: Memory, terms: Terms) -> int:
    """Write the rows, read from the descriptor `source`, plus the deltas of the terms; return how many could be.

    Fewer than all are written where the system refuses, or a result is not finite.
    """
    passage = _Passage(
        begin=rows.begin,
        to=target.begin,
        rows=rows.last - rows.first,
        columns=rows.columns,
        block=memory.rows,
        some=target.at_once,
        read=memory.read.ctypes.data,
        made=memory.made.ctypes.data,
        source=source,
        out=target.descriptor,
        source_type=TYPES[rows.dtype],
        out_type=TYPES.get(target.dtype, 0),
    )
    if target.storing is not None:
        passage.storing = ctypes.pointer(target.storing)
    if rows.coded is not None:
        import numpy as np  # only for quantised weights

        from lora_tool.native.coded_rows import codes_of

        scales = np.ascontiguousarray(rows.coded.scales)
        codes = codes_of(rows.coded, scales, rows.dtype)
        codes.stride = rows.row_bytes
        codes.above += rows.above
        passage.codes = ctypes.pointer(codes)
    return kernel.pass_on(ctypes.addressof(passage), terms)


def write_array(kernel: Kernel, array: NativeArray, out: int, offset: int) -> None:
    """Write an array, whose elements lie one after the other, to the descriptor `out` at `offset`.

    All in one call, which needs the interpreter lock once, not for every few bytes. Raises as `write_exactly`.
    """
    done = kernel.write(out, array.ctypes.data, array.nbytes, offset, WRITE_BYTES)
    if done < array.nbytes:
        write_exactly(out, bytes_of(array)[done:], offset + done)
