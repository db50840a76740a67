"""Rows of W as the compiled kernel reads them where they are numbers."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.core.tensors import DType
from lora_tool.native.library import Kernel, KernelTerm

NativeArray = NDArray[Any]
Terms = tuple[KernelTerm, ...]


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
