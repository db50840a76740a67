"""The arithmetic of `--precision float32` and `float64`, in numpy, on blocks of rows that fit in the cache.

Arrays come and go as numpy types; bfloat16, which numpy lacks, is uint16 here and converted by its bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.tensors import DType

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]
AnyArray = NDArray[Any]

STORAGE: dict[DType, np.dtype[Any]] = {
    DType.BF16: np.dtype("<u2"),
    DType.F16: np.dtype("<f2"),
    DType.F32: np.dtype("<f4"),
    DType.F64: np.dtype("<f8"),
}
"""The numpy type that holds the stored elements of each float type."""

_CACHE_BLOCK = 1 << 16
"""Elements per pass of a conversion: its scratch stays in the second-level cache (measured: 2^15 and 2^17 are slower)."""


def widen(stored: AnyArray, dtype: DType, out: AnyArray) -> AnyArray:
    """Write the values of `stored`, elements of `dtype`, into the float array `out` and return it. Exact."""
    if dtype is not DType.BF16:
        np.copyto(out, stored, casting="same_kind")
        return out
    if out.dtype == np.float64:
        np.copyto(out, widen(stored, dtype, np.empty(stored.shape, np.float32)))
        return out
    bits = out.view(np.uint32)
    np.copyto(bits, stored)
    np.left_shift(bits, 16, out=bits)
    return out


def round_to(values: AnyArray, dtype: DType) -> AnyArray:
    """Return `values`, float32 or float64, in the storage type of `dtype`: rounded once, to nearest, ties to even.

    NaN stays NaN. A finite value beyond the range becomes infinite, as IEEE 754 says; `overflows` tells.
    """
    if dtype is DType.BF16:
        narrow = round_to_odd(values) if values.dtype == np.float64 else values
        return round_bf16(narrow)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[dtype], copy=False)


def round_bf16(values: F32) -> U16:
    """Return float32 `values` as bfloat16 bits, rounded to nearest, ties to even; NaN stays a quiet NaN."""
    flat = np.ascontiguousarray(values).reshape(-1)
    out = np.empty(flat.shape, np.uint16)
    scratch = np.empty(min(_CACHE_BLOCK, flat.size), np.uint32)
    for at in range(0, flat.size, _CACHE_BLOCK):
        bits = flat[at : at + _CACHE_BLOCK].view(np.uint32)
        rounded = scratch[: bits.size]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        # the upper halves of little-endian words, without shifting all of them down
        out[at : at + _CACHE_BLOCK] = rounded.view(np.uint16)[1::2]
    nan = np.isnan(flat) if not _square_sum_is_finite(flat) else None
    if nan is not None and nan.any():
        # the carry of the addition above turns some NaN into infinity or zero
        out[nan] = (flat[nan].view(np.uint32) >> 16).astype(np.uint16) | 0x0040
    return out.reshape(values.shape)


def round_to_odd(values: F64) -> F32:
    """Return float64 `values` as float32 rounded to odd, from which a second rounding to 16 bits is exact.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
    IEEE Transactions on Computers 57 (2008): rounding to odd with at least two extra bits avoids double rounding.
    """
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    inexact = np.isfinite(nearest) & (nearest != values)
    too_far = inexact & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    bits = nearest.view(np.uint32)
    bits -= too_far
    bits |= inexact
    return nearest


def add_delta(total: F32, b: F32, a: F32, scaling: float, scratch: F32) -> None:
    """Add `scaling`·(b @ a) to `total` in place, in PEFT's order: product, scaling, sum.

    `b` is [rows, r], `a` is [r, columns]; `scratch` is as large as `total`.
    """
    np.matmul(b, a, out=scratch)
    if scaling != 1:
        np.multiply(scratch, np.float32(scaling), out=scratch)
    np.add(total, scratch, out=total)


def exact_product(b: F64, a: F64) -> F64:
    """Return b @ a in float64, independent of the order in which a BLAS sums.

    Both factors are split into slices of so few bits that every partial sum of a product of slices is exact in 53
    bits; the four products are then added in a fixed order. (Ozaki, Ogita, Oishi, Rump, "Error-free transformations
    of matrix multiplication", Numerical Algorithms 59, 2012.) The part of a factor beyond two slices, less than
    2^-40 of the largest entry of its row of b or column of a, is left out.
    """
    rank = b.shape[1]
    bits = (53 - max(rank - 1, 0).bit_length()) // 2
    b_high, b_low = _split(b, bits, axis=1)
    a_high, a_low = _split(a, bits, axis=0)
    total = b_low @ a_low
    total += b_low @ a_high
    total += b_high @ a_low
    total += b_high @ a_high
    return np.asarray(total)


def _split(factor: F64, bits: int, axis: int) -> tuple[F64, F64]:
    """Return two slices of `factor`, each of at most `bits` bits below the largest entry along `axis`."""
    largest = np.abs(factor).max(axis=axis, keepdims=True)
    exponent = np.frexp(largest)[1]
    high = _keep(factor, exponent - bits)
    low = _keep(factor - high, exponent - 2 * bits)
    return high, low


def _keep(values: F64, exponent: NDArray[Any]) -> F64:
    """Return `values` rounded to multiples of 2^exponent, exactly representable."""
    return np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent)


def first_nonfinite(values: AnyArray) -> int | None:
    """Return the flat position of the first NaN or infinity of a float array, or None."""
    flat = values.reshape(-1)
    if _square_sum_is_finite(flat):
        return None
    bad = ~np.isfinite(flat)
    return int(bad.argmax()) if bad.any() else None


def _square_sum_is_finite(flat: AnyArray) -> bool:
    """One fused pass of BLAS: finite for sure if the sum of squares is; else somebody must look closer."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)))


def is_finite_stored(stored: AnyArray, dtype: DType) -> bool:
    """Return whether all elements in their storage type are finite."""
    if dtype is DType.BF16:
        return not bool(((stored & 0x7F80) == 0x7F80).any())  # noqa: PLR2004 - the exponent of bfloat16
    return first_nonfinite(stored) is None


def overflows(values: AnyArray, stored: AnyArray, dtype: DType) -> bool:
    """Return whether rounding made an infinity of a finite value."""
    finite = stored & 0x7F80 != 0x7F80 if dtype is DType.BF16 else np.isfinite(stored)  # noqa: PLR2004
    return bool((np.isfinite(values) & ~finite).any())
