"""Whether weights are float32 masters, rounded: a module of its own, as numpy is loaded only where there are both."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.core.tensors import DType


def rounds_to(masters: bytes, held: bytes, dtype: DType) -> bool:
    """Return whether `held`, values of `dtype`, are the float32 values `masters`, rounded to nearest even."""
    master, bits = np.frombuffer(masters, "<f4"), np.frombuffer(held, f"<u{dtype.bits // 8}")
    if dtype is DType.F32:
        # also 16-bit weights that were widened when they were saved
        rounded = (master.view(np.uint32), _bfloat16(master).astype(np.uint32) << 16, _float16(master, np.float32))
        return any(np.array_equal(each.view(np.uint32), bits) for each in rounded)
    if dtype is DType.BF16:
        return np.array_equal(_bfloat16(master), bits)
    if dtype is DType.F16:
        return np.array_equal(_float16(master, np.float16).view(np.uint16), bits)
    return True  # no type that weights are trained in: nothing is proven


def _bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    with np.errstate(all="ignore"):
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _float16(values: NDArray[Any], out: type[np.floating[Any]]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return values.astype(np.float16).astype(out)
