"""The steps that write one module's factors for a server: scaled into B, padded with zeros."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.plans.algebra.factor_steps import factor_ops, part_names, step_of
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.core.factor_ops import Beside, Columns, Mix, SmallMatrix
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, Op, copied_as, row_ops
from lora_tool.plans.core.steps import Step


def padded_steps(
    factors: Factors,
    dtype: DType,
    lowering: tuple[SmallMatrix, SmallMatrix] | None,
    rank: int,
    *,
    experts: int = 1,
) -> Iterator[Step]:
    """Yield the steps that write lora_A and lora_B of `rank`, of zeros beyond the rank that the factors have.

    Those of fused `experts` have that rank each: one expert's rows of A follow the other's, and the columns of B are of
    the experts in turn, so that those of zeros come last.
    """
    above, across = factor_ops(factors, dtype, lowering)
    own = (lowering[0].columns if lowering else factors.rank) // experts
    if missing := rank - own:
        first = factors.a_parts[0]
        of_each = (
            [row_ops(above)]
            if experts == 1
            else [(copied_as(dtype, rows_of(first, at * own, own)),) for at in range(experts)]
        )
        above = Assemble(parts=tuple(part for rows in of_each for part in (*rows, *zero_rows(first, missing))))
        across = _wider(factors, across, missing * experts, lowering)
    a, b = part_names(factors)
    yield step_of(f"{PREFIX}{factors.module}.{a}", dtype, (rank * experts, *factors.inner), above)
    yield step_of(f"{PREFIX}{factors.module}.{b}", dtype, (factors.out, rank * experts, *factors.outer), across)


def zero_rows(like: StoredTensor, count: int, width: int | None = None) -> Iterator[Beside]:
    """Yield operations for `count` rows of zeros, `width` wide, or as wide as `like`. Its values are not read."""
    while count:
        some = min(count, like.shape[0])
        yield Beside(parts=(Columns(tensor=rows_of(like, 0, some), count=0),), zeros=width or like.shape[1])
        count -= some


def _wider(factors: Factors, op: Op, zeros: int, lowering: tuple[SmallMatrix, SmallMatrix] | None) -> Op:
    if lowering:
        return Mix(parts=factors.b_parts, matrix=padded(lowering[0], zeros))
    if isinstance(op, Beside):
        return replace(op, zeros=zeros)
    return Beside(
        parts=tuple(Columns(tensor=term.b, count=term.rank, scale=term.scale) for term in factors.terms), zeros=zeros
    )


def padded(matrix: SmallMatrix, columns: int) -> SmallMatrix:
    """Return the matrix with so many columns of zeros more."""
    return matrix if not columns else SmallMatrix.of([[*row, *[0.0] * columns] for row in matrix.values.tolist()])
