"""The arithmetic of `--precision float32` and `float64`, in numpy, on blocks of rows that fit in the cache.

bfloat16, which numpy lacks, is ml_dtypes' type of that name: it converts without the interpreter lock.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.core.tensors import DType
from lora_tool.formats.stored_numbers import bfloat16
from lora_tool.plans.core.delta_retention import DeltaRetention

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
AnyArray = NDArray[Any]


class _Storage(dict[DType, "np.dtype[Any]"]):
    """numpy's own types, and bfloat16 from when it is needed."""

    def __missing__(self, dtype: DType) -> np.dtype[Any]:
        if dtype is not DType.BF16:
            raise KeyError(dtype)
        return self.setdefault(dtype, bfloat16())


STORAGE = _Storage({DType.F16: np.dtype("<f2"), DType.F32: np.dtype("<f4"), DType.F64: np.dtype("<f8")})
"""The numpy type that holds the stored elements of each float type."""

CACHE_BLOCK = 1 << 17
"""Elements per pass of a chain of elementwise operations, so that each finds the last one's result in the
second-level cache (measured: 2^16 and 2^19 are slower)."""


def bytes_of(array: AnyArray) -> memoryview:
    """Return the bytes of a contiguous array, to read into or write from."""
    return array.reshape(-1).view(np.uint8).data


def round_to(values: AnyArray, dtype: DType, out: AnyArray) -> AnyArray:
    """Write `values`, float32 or float64, into `out` as elements of `dtype`: rounded once, to nearest, ties to even.

    NaN stays NaN. A finite value beyond the range becomes infinite, as in IEEE 754; see `overflows`. `out` is of
    the storage type of `dtype`, and is returned.
    """
    # float64 would go to bfloat16 by way of float32, which rounds twice
    twice = dtype is DType.BF16 and values.dtype == np.float64
    np.copyto(out, round_to_odd(values) if twice else values, casting="unsafe")
    return out


def round_to_odd(values: F64) -> F32:
    """Return float64 `values` as float32 rounded to odd, from which a second rounding to 16 bits is exact.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
    IEEE Transactions on Computers 57 (2008): rounding to odd with at least two extra bits avoids double rounding.
    """
    nearest = values.astype(np.float32)
    inexact = np.isfinite(nearest) & (nearest != values)
    too_far = inexact & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    bits = nearest.view(np.uint32)
    bits -= too_far
    bits |= inexact
    return nearest


Slices = tuple[F64, F64]
"""A factor as the sum of two, of so few bits each that products of slices can be summed without rounding."""


def exact_product(b: Slices, a: Slices) -> F64:
    """Return b @ a in float64, independent of the order in which a BLAS sums.

    Every partial sum of a product of slices is exact in 53 bits; the four products are added in a fixed order.
    (Ozaki, Ogita, Oishi, Rump, "Error-free transformations of matrix multiplication", Numerical Algorithms 59, 2012.)
    """
    total = b[1] @ a[1]
    total += b[1] @ a[0]
    total += b[0] @ a[1]
    total += b[0] @ a[0]
    return np.asarray(total)


def slices(factor: F64, *, axis: int) -> Slices:
    """Return `factor` as two slices for a product that sums along `axis`.

    The remainder, less than 2^-40 of the largest entry along `axis`, is dropped.
    """
    bits = (53 - max(factor.shape[axis] - 1, 0).bit_length()) // 2
    largest = np.abs(factor).max(axis=axis, keepdims=True, initial=0)
    exponent = np.frexp(largest)[1]
    high = _keep(factor, exponent - bits)
    return high, _keep(factor - high, exponent - 2 * bits)


def _keep(values: F64, exponent: NDArray[Any]) -> F64:
    """Return `values` rounded to multiples of 2^exponent, exactly representable."""
    return np.asarray(np.ldexp(np.rint(np.ldexp(values, -exponent)), exponent))


def sums_of_squares(values: AnyArray, *, axis: int) -> AnyArray:
    """Return ∑ v² of a matrix along `axis`, in its precision, added in pairs: in one order on every machine.

    `sum` and `einsum` add as many at a time as a processor's registers hold, and `einsum` fuses where it can.
    """
    parts = values * values
    if axis == 1:
        parts = parts.T
    left = len(parts)
    while left > 1:
        half = left // 2
        parts[:half] += parts[left - half : left]
        left -= half
    return parts[0].copy() if len(parts) else np.zeros(parts.shape[1:], parts.dtype)


def is_small(values: AnyArray) -> bool:
    """Return whether all elements of a flat float32 or float64 array are below 2^63, which NaN and infinity are not.

    One fused pass of BLAS. It may say no where it is so, but not for what weights are like.
    """
    return bool(np.dot(values, values) < 2.0**126)


def overflows(values: AnyArray, rounded: AnyArray) -> bool:
    """Return whether rounding `values` to `rounded` made an infinity of a finite value."""
    return bool((np.isinf(rounded) & np.isfinite(values)).any())


_SAMPLES = 1024


def retention(source: AnyArray, meant: AnyArray, written: AnyArray) -> DeltaRetention:
    """Return what rounding left of the change from `source` to `meant`, flat arrays, on about a thousand elements.

    The sums are rounded once, so they do not depend on how a machine sums.
    """
    every = max(1, meant.size // _SAMPLES) | 1
    before = source[::every].astype(np.float64)
    delta = meant[::every].astype(np.float64) - before
    effect = written[::every].astype(np.float64) - before
    return DeltaRetention(meant=_sum(delta * delta), written=_sum(effect * effect), shared=_sum(delta * effect))


def _sum(values: AnyArray) -> float:
    return math.fsum(values.tolist())
