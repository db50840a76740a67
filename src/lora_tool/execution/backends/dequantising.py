"""Quantised weights as numbers, and numbers as codes, by the compiled kernel: the bits that numpy gives."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.core.tensors import DType
from lora_tool.execution import kernels
from lora_tool.formats.quantised.coded import Scaled
from lora_tool.formats.quantised.decoding import Arithmetic
from lora_tool.native.coded_rows import CodedRows
from lora_tool.native.library import TYPES, Kernel, kernel

F32 = NDArray[np.float32]


class KernelArithmetic(Arithmetic):
    """See `Arithmetic`. Numpy decodes the formats that the kernel lacks."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def scale(self, part: Scaled, out: F32) -> None:
        """See `Arithmetic`."""
        CodedRows(self._kernel, part, DType.F32).write(slice(None), out, DType.F32)

    def rounded(self, values: F32, dtype: DType) -> NDArray[Any]:
        """See `Arithmetic`."""
        if dtype in TYPES and dtype is not DType.F32:
            flat = np.ascontiguousarray(values)
            out = np.empty(values.shape, kernels.STORAGE[dtype])
            if self._kernel.convert(flat.ctypes.data, DType.F32, out.ctypes.data, dtype, flat.size):
                return out
        return super().rounded(values, dtype)


def arithmetic() -> Arithmetic:
    """Return the kernel's arithmetic, that of numpy where there is none. Raises as `kernel`."""
    found = kernel()
    return Arithmetic() if found is None else KernelArithmetic(found)
