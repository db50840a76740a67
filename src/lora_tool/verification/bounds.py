"""How far a merged value may be from the recomputed one, by the arithmetic that made it.

Notation: u is the unit roundoff of a type (2^-8 for BF16, 2^-11 for F16, 2^-24 for F32, 2^-53 for F64), r the rank,
and γ(n) = n·u/(1 - n·u). A sum of products of length r, computed in any order with roundoff u, is off by at most
γ(r)·|B|·|A| (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., 2002, section 3.5); scaling it and
adding W are two more roundings. So the accumulated value is within γ(r+2)·(|W| + s·|B|·|A|) of W + s·B·A, and
storing it costs half a unit in the last place. We use |b·a| ≤ ‖b‖·‖a‖ for the entries of |B|·|A|, and
|W| ≤ |W'| + |ΔW| with |W'| ≤ 2/u' half units in the last place of a result of roundoff u'. A bias of LoRA is a
product of rank one, of its own size.

PEFT adds one adapter after the other, and rounds each sum. A sum before the last is at most |W'| plus what comes after
it, so each such rounding costs u'·(|W'| + Σ‖b‖·‖a‖) at most.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from lora_tool.core.tensors import DType
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.plans.core.ops import LowRank, Precision, RowOp
from lora_tool.verification.elements import FLOATS

_SINGLE = FLOATS[DType.F32].roundoff
_DOUBLE = FLOATS[DType.F64].roundoff
_LEFT_OUT = 2.0**-40
"""What `--precision float64` leaves out of each factor, relative to its largest entry."""


class Bound(Struct, frozen=True, kw_only=True):
    """|W' - (W + ΔW)| ≤ `of_result` half units in the last place + `of_value`·|W'| + `of_change`·|ΔW| +
    `of_product`·‖b‖·‖a‖. The unit of codes is the distance to the next.
    """

    of_result: float
    of_value: float = 0.0
    of_change: float = 0.0
    of_product: float = 0.0


def working_type(op: RowOp, out: DType) -> np.dtype[np.float32] | np.dtype[np.float64]:
    """Return the type to compare in: float32 for 16-bit results, whose roundoff is 2^-13 of it at least, else float64."""
    narrow = out in (DType.BF16, DType.F16) and op.source.dtype is not DType.F64
    return np.dtype(np.float32) if narrow else np.dtype(np.float64)


def stated_bound(op: RowOp, out: DType, precision: Precision) -> Bound:
    """Return the bound of what lora-tool writes with `precision`."""
    result = FLOATS[out].roundoff
    if op.taken_out:
        precision = Precision.PEFT  # whatever was asked for: it is PEFT's own formula, in float32
    sums = op.sums
    if not sums.deltas:
        return _with_comparison(Bound(of_result=1), op, out)
    unit = _DOUBLE if precision is Precision.FLOAT64 else _SINGLE
    steps = _gamma(sums.products + 2 * sums.deltas, unit)
    of_product = 2.5 * steps + (2 * sums.products * _LEFT_OUT if precision is Precision.FLOAT64 else 0)
    of_result = 1 + 2.5 * steps / result
    of_change = steps
    if sums.squares:
        # a norm is off by half of what its n squares are, the factor and the product by one rounding each
        of_result += 2 * _gamma(sums.squares // 2 + sums.products + 8, unit) / result
    if precision is Precision.PEFT:
        if FLOATS[op.source.dtype].roundoff < result:  # PEFT adds to a base that was rounded when it was loaded
            of_result, of_change = of_result + 2, of_change + result
            if sums.squares:  # where W and ΔW cancel, W's rounding is of ΔW's size, and DoRA scales it as well
                of_product += result
        if sums.rounded:
            of_change, of_product = of_change + result, of_product + (sums.deltas - 1) * result
            if (
                op.source.dtype is DType.F16
            ):  # below 2^-14 a delta is rounded to 2^-24, as coarsely as the result at most
                of_result += sums.deltas
        of_result, of_product = of_result + 2.1 * (sums.deltas - 1), of_product + 1.1 * (sums.deltas - 1) * result
    return _with_comparison(Bound(of_result=of_result, of_change=of_change, of_product=of_product), op, out)


def sixteen_bit_bound(op: RowOp, out: DType) -> Bound:
    """Return the bound of a merge that another tool made: rounded after every operation, in the narrower type.

    PEFT does so without `autocast_adapter_dtype`, on 16-bit devices, and in `safe_merge`: factors, delta, scaled delta
    and sum are each rounded. A model loaded in 16 bits and saved in 32 has the values of 16; so are most quantised ones.
    """
    result = FLOATS[out].roundoff
    unit = max(result, FLOATS[op.source.dtype].roundoff)
    if not isinstance(op, LowRank) or (out is DType.F32 and encoding_of(op.source) is not None):
        unit = max(unit, FLOATS[DType.BF16].roundoff)
    rounded_first = 2 * unit / result if unit > result or FLOATS[op.source.dtype].roundoff < result else 0.0
    of_result = unit / result + rounded_first + (8 * unit / result if op.sums.squares else 0.0)
    earlier = max(0, op.sums.deltas - 1)
    strict = stated_bound(op, out, Precision.FLOAT32)
    return Bound(
        of_result=strict.of_result + of_result + 2.1 * earlier * unit / result,
        of_change=strict.of_change + 4 * unit,
        of_product=strict.of_product + (4 + 2 * earlier) * unit,
    )


def _with_comparison(bound: Bound, op: RowOp, out: DType) -> Bound:
    """Add what the comparison itself may be off by: float64 products, and a few operations in the working type."""
    unit = 4 * (_SINGLE if working_type(op, out) == np.float32 else _DOUBLE)
    return Bound(
        of_result=bound.of_result + 2 * unit / FLOATS[out].roundoff,
        of_change=bound.of_change + unit,
        of_product=bound.of_product + _gamma(op.sums.products + 4, _DOUBLE),
    )


def _gamma(steps: int, unit: float) -> float:
    return steps * unit / (1 - steps * unit)
