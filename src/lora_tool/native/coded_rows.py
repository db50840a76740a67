"""Rows of W as the compiled kernel reads them where they are quantised: codes with their scales."""

from __future__ import annotations

import ctypes

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.core.tensors import DType
from lora_tool.formats.quantised.coded import Code, Scaled
from lora_tool.native.library import TYPES, Codes, Kernel
from lora_tool.native.rows import NativeArray, Terms

KINDS = list(Code)
"""In the order of `enum kind` in `merge.c`."""


class CodedRows(Struct, frozen=True):
    """Rows of codes, which become numbers of a type before anything is added."""

    kernel: Kernel
    part: Scaled
    dtype: DType

    def write(self, rows: slice, out: NativeArray, dtype: DType, terms: Terms = ()) -> bool:
        """See `PlainRows`."""
        first, last, _ = rows.indices(len(self.part.codes))
        scales = np.ascontiguousarray(self.part.scales)
        codes = codes_of(self.part, scales, self.dtype)
        codes.bytes += first * codes.stride
        codes.above += first
        size = last - first, self.part.columns
        return self.kernel.merge_codes(codes, out.ctypes.data, dtype, size, terms)

    def write_again(self, storing: ctypes.Structure, out: NativeArray, terms: Terms) -> bool:
        """Write all rows, plus the deltas of the terms, as codes again; return False where a result is not finite."""
        scales = np.ascontiguousarray(self.part.scales)
        codes = codes_of(self.part, scales, self.dtype)
        return self.kernel.requantise(codes, ctypes.addressof(storing), out.ctypes.data, out.shape, terms)


def codes_of(part: Scaled, scales: NDArray[np.float32], dtype: DType = DType.F32) -> Codes:
    """Return the part with these contiguous scales as the kernel reads it, its numbers rounded to a type first.

    It holds addresses alone: `part` and `scales` must be kept while it is used.
    """
    table = part.table.numbers.ctypes.data_as(ctypes.c_void_p)
    return Codes(
        bytes=part.codes.ctypes.data,
        table=table,
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
