"""Results that are small beside the rounding errors of their sum, as W and ΔW nearly cancel: summed again in numpy.

`native/again.h` does the same by the same bound, but that a BLAS may add up in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.execution.kernels import F32, F64, AnyArray
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.plan.core.ops import LowRank
from lora_tool.tensors import DType

_DIGITS = {DType.BF16: 8, DType.F16: 11}
_SLACK = 1.01
"""For errors of errors."""
_AT_ONCE = 1 << 20
"""Products that are in memory together."""


def digits_of(unit: ComputeUnit) -> int:
    """Return of how many binary digits a result may be one off in the last, whatever cancels; 0 where that is not asked.

    It is asked of quantised weights that become 16-bit ones. Plain weights keep the bits that PEFT gives them.
    """
    quantised = isinstance(unit.op, LowRank) and encoding_of(unit.op.source) is not None
    return _DIGITS.get(unit.out.dtype, 0) if quantised else 0


class Product(Struct, frozen=True, kw_only=True):
    """scaling·(left·right), rows of a delta that float32 products were added up for."""

    left: F32
    right: F32
    scaling: float


class Doubts:
    """Which results of rows of W + the products may be off, by what their factors reach; for all parts of a block."""

    def __init__(self, products: Sequence[Product], digits: int) -> None:
        self._products = products
        self._reaches = [
            (
                _SLACK * 2.0 ** (digits - 24) * (len(each.right) + len(products) + 2) * abs(each.scaling),
                np.linalg.norm(each.left, axis=1),
                np.linalg.norm(each.right, axis=0),
            )
            for each in products
        ]
        self._most = sum(factor * left.max(initial=0) * right.max(initial=0) for factor, left, right in self._reaches)

    def mend(self, total: F32, source: AnyArray, start: int) -> None:
        """Sum some elements of `total` again, flat, those from `start` on of the rows of `source` + the products.

        Each becomes one of the two neighbours of the exact sum in a type of so many digits, once it is rounded to that.
        """
        near = np.flatnonzero(np.abs(total) < self._most)
        step = max(1, _AT_ONCE // max(1, sum(len(each.right) for each in self._products)))
        for at in range(0, len(near), step):
            some = near[at : at + step]
            rows, columns = np.divmod(some + start, self._products[0].right.shape[1])
            doubt = sum(factor * left[rows] * right[columns] for factor, left, right in self._reaches)
            own = np.abs(total[some]) < doubt
            total[some[own]] = _sums(source[some[own]], self._products, rows[own], columns[own], doubt[own])


def _sums(weights: AnyArray, products: Sequence[Product], rows: AnyArray, columns: AnyArray, doubt: F64) -> F64:
    """Return W + the products at these places: in float64, exactly where that is in doubt, too."""
    wide = weights.astype(np.float64)
    for each in products:
        left, right = each.left[rows].astype(np.float64), each.right[:, columns].astype(np.float64)
        wide += each.scaling * np.einsum("nk,kn->n", left, right)
    for at in np.flatnonzero(np.abs(wide) < doubt * 2.0**-29):
        wide[at] = _exact_sum(float(weights[at]), products, rows[at], columns[at])
    return wide


def _exact_sum(weight: float, products: Sequence[Product], row: int, column: int) -> float:
    from fractions import Fraction  # imports decimal, for what is rare

    total = Fraction(weight)
    for each in products:
        pairs: NDArray[np.float64] = np.stack([each.left[row], each.right[:, column]]).astype(np.float64)
        total += Fraction(each.scaling) * sum((Fraction(b) * Fraction(a) for b, a in pairs.T.tolist()), Fraction())
    return float(total)
