"""The numpy types of stored elements, and of what reads and decodes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lora_tool.tensors import DType, StoredTensor

Array = NDArray[Any]
F32 = NDArray[np.float32]
Read = Callable[[StoredTensor, int, int], NDArray[np.uint8]]
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
