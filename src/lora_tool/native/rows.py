"""Rows of W as the compiled kernel reads them: numbers or codes, in memory or in a file."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from lora_tool.core.tensors import DType
from lora_tool.native.library import TYPES, Kernel
from lora_tool.native.structures import Codes, KernelTerm, Passage, Storing

if TYPE_CHECKING:
    from lora_tool.formats.quantised.coded import Scaled

NativeArray = NDArray[Any]
Terms = tuple[KernelTerm, ...]

KINDS = ("e4m3", "int8", "halves")
"""The values of `Code`, in the order of `enum kind` in `merge.c`."""
WRITE_BYTES = 1 << 20
"""Bytes that the kernel writes at a time at most; it writes less where that is faster, see `files.h`."""


class PlainRows(Struct, frozen=True):
    """Rows of numbers."""

    kernel: Kernel
    stored: NativeArray
    """[rows, columns]"""
    dtype: DType

    def write(self, rows: slice, out: NativeArray, dtype: DType, terms: Terms = ()) -> bool:
        """Write these rows, plus the deltas of the terms, as a type; return False where a result is not finite.

        `out` may be where they are stored, if both types are of one size.
        """
        some = self.stored[rows]
        place, target = some.ctypes.data, out.ctypes.data
        if terms:
            return self.kernel.merge(place, self.dtype, target, dtype, some.shape, terms)
        return self.kernel.convert(place, self.dtype, target, dtype, some.size)


class CodedRows(Struct, frozen=True):
    """Rows of codes, which become numbers of a type before anything is added."""

    kernel: Kernel
    part: Scaled
    dtype: DType

    def write(self, rows: slice, out: NativeArray, dtype: DType, terms: Terms = ()) -> bool:
        """See `PlainRows`."""
        first, last, _ = rows.indices(len(self.part.codes))
        scales = np.ascontiguousarray(self.part.scales)
        codes = _codes_of(self.part, scales, self.dtype)
        codes.bytes += first * codes.stride
        codes.above += first
        size = last - first, self.part.columns
        return self.kernel.merge_codes(codes, out.ctypes.data, dtype, size, terms)


def _codes_of(part: Scaled, scales: NDArray[np.float32], dtype: DType) -> Codes:
    """Return the part with these contiguous scales as the kernel reads it, its numbers rounded to a type first.

    It holds addresses alone: `part` and `scales` must be kept while it is used.
    """
    return Codes(
        bytes=part.codes.ctypes.data,
        table=part.table.numbers.ctypes.data,
        scales=scales.ctypes.data,
        stride=part.codes.strides[0],
        apart=scales.shape[1],
        group=part.group,
        tall=part.tall,
        above=part.above,
        again=part.again,
        kind=KINDS.index(part.table.code),
        type=TYPES[dtype],
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

    def pass_on(
        self,
        kernel: Kernel,
        terms: Terms,
        *,
        source: int,
        out: int,
        begin: int,
        dtype: DType,
        blocks: tuple[NativeArray, NativeArray],
        storing: Storing | None = None,
    ) -> int:
        """Write the rows, read from the descriptor `source`, plus the deltas of the terms, as `dtype` to the descriptor
        `out` at `begin`; return how many could be: not all where the system refuses, or a result is not finite.

        `blocks` are memory for rows as they are read, and as they are written: the same where both are of one size.
        Codes are stored again as `storing` says, of the type of those that are read.
        """
        read, made = blocks
        passage = Passage(
            begin=self.begin,
            to=begin,
            rows=self.last - self.first,
            columns=self.columns,
            block=len(read),
            some=WRITE_BYTES,
            read=read.ctypes.data,
            made=made.ctypes.data,
            source=source,
            out=out,
            source_type=TYPES[self.dtype],
            out_type=TYPES.get(dtype, 0),
        )
        if storing is not None:
            passage.storing = ctypes.pointer(storing)
        if self.coded is not None:
            scales = np.ascontiguousarray(self.coded.scales)
            codes = _codes_of(self.coded, scales, self.dtype)
            codes.stride = self.row_bytes
            codes.above += self.above
            passage.codes = ctypes.pointer(codes)
        return kernel.pass_on(ctypes.addressof(passage), terms)
