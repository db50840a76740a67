"""The result of a scan of a tensor, and the bit layout of float types."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct

from lora_tool.core.tensors import DType

Opener = Callable[[Path], AbstractContextManager[int]]
"""Gives a descriptor of a file for as long as it is read."""

LARGE = 512.0
"""Trained factors stay below about 1. Magnitudes from this on are told; it is a power of two that all types have."""


class WeightScan(Struct, frozen=True, kw_only=True):
    """The statistics of a tensor's values."""

    nonfinite: int = 0
    first: int | None = None
    """The index of the first value that is NaN or infinite."""
    all_zero: bool = False
    constant: bool = False
    """Whether all values, at least two, have the same bits, and are neither zero nor NaN nor infinite."""
    largest: float = 0.0
    """The largest finite magnitude where it is `LARGE` or more, else 0."""


class Layout(Struct, frozen=True):
    """How a float type lies in its bytes: exponent and fraction bits; a sign is before them."""

    nbytes: int
    exponent: int
    fraction: int

    @property
    def infinity(self) -> int:
        """The bits of +infinity; those of a magnitude are larger exactly where it is NaN."""
        return ((1 << self.exponent) - 1) << self.fraction

    @property
    def large(self) -> int:
        """The bits of `LARGE`; those of every larger magnitude are larger."""
        return (int(math.log2(LARGE)) + (1 << (self.exponent - 1)) - 1) << self.fraction

    def number(self, bits: int) -> float:
        """Return the value of the bits of a normal magnitude."""
        exponent, fraction = bits >> self.fraction, bits & ((1 << self.fraction) - 1)
        bias = (1 << (self.exponent - 1)) - 1
        return math.ldexp((1 << self.fraction) + fraction, exponent - bias - self.fraction)


LAYOUTS = {
    DType.F64: Layout(8, 11, 52),
    DType.F32: Layout(4, 8, 23),
    DType.BF16: Layout(2, 8, 7),
    DType.F16: Layout(2, 5, 10),
}


NOT_FINITE = {
    DType.F8_E4M3: b"\x7f\xff",
    DType.F8_E5M2: b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff",
    DType.F8_E8M0: b"\xff",
    DType.F8_E4M3FNUZ: b"\x80",
    DType.F8_E5M2FNUZ: b"\x80",
}
"""The codes of one byte that are NaN or infinite (OCP 8-bit Floating Point 1.0 and Microscaling 1.0, ONNX's float8)."""


def has_sign(dtype: DType) -> bool:
    """Return whether the first bit of an element is its sign, and zero may have one."""
    return dtype in LAYOUTS or len(NOT_FINITE.get(dtype, b"")) > 1


def magnitude(dtype: DType) -> int:
    """Return the bits of an element, or of its bytes if it has no float type, that are not the sign."""
    layout = LAYOUTS.get(dtype)
    return (1 << 8 * (layout.nbytes if layout else 1) - has_sign(dtype)) - 1
