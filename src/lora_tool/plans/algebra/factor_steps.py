"""The steps that write one module's factors: stacked, or multiplied by small matrices that lower the rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import DType, StoredTensor, TensorAction, TensorSpec
from lora_tool.plans.algebra.terms import Factors, biases
from lora_tool.plans.core.factor_ops import Beside, Columns, Mix, SmallMatrix
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, Op, copied_as, row_ops
from lora_tool.plans.core.steps import Step

_POWER_OF_TWO = 0.5
"""frexp's mantissa of a power of two."""


def exact_type(sums: Iterable[Factors], *, turned: bool = False) -> DType:
    """Return the type in which the factors of all sums can be written without rounding, float32 where none is.

    A module `turned` to a lower rank always rounds. Scaling by a power of two does not, except in float16 with its
    few exponents.
    """
    found, scaled = set(), turned
    for factors in sums:
        for term in factors.terms:
            found |= {term.a.dtype, term.b.dtype} | ({term.bias.dtype} if term.bias else set())
            scaled |= abs(math.frexp(term.scale)[0]) != _POWER_OF_TWO or (term.scale != 1 and DType.F16 in found)
            scaled |= term.bias is not None and len(factors.terms) > 1
    if DType.F64 in found:
        return DType.F64
    return found.pop() if len(found) == 1 and not scaled else DType.F32


def part_names(factors: Factors) -> tuple[str, str]:
    """Return PEFT's names of A and B of the module."""
    return ("lora_embedding_A", "lora_embedding_B") if factors.embedding else ("lora_A.weight", "lora_B.weight")


def factor_ops(factors: Factors, dtype: DType, lowering: tuple[SmallMatrix, SmallMatrix] | None) -> tuple[Op, Op]:
    """Return the operations that make A and B, of all scaling.

    `lowering` are the matrices for B and A that lower the rank; None stacks the factors of all terms.
    """
    if lowering:
        return Mix(parts=factors.a_parts, matrix=lowering[1], below=True), Mix(
            parts=factors.b_parts, matrix=lowering[0]
        )
    copies = tuple(copied_as(dtype, part) for part in factors.a_parts)
    columns = tuple(Columns(tensor=term.b, count=term.rank, scale=term.scale) for term in factors.terms)
    unscaled = len(columns) == 1 and columns[0].scale == 1
    return (
        copies[0] if len(copies) == 1 else Assemble(parts=copies),
        copied_as(dtype, columns[0].tensor) if unscaled else Beside(parts=columns),
    )


def bias_steps(factors: Factors, dtype: DType = DType.F32) -> Iterator[Step]:
    """Yield the step that writes the bias of lora_B, where there is one."""
    held = biases(factors.terms)
    if held:
        scales = [factors.terms[at].scale for at in held]
        op = _summed([Columns(tensor=each, count=1, scale=s) for each, s in zip(held.values(), scales, strict=True)])
        yield step_of(f"{PREFIX}{factors.module}.lora_B.bias", dtype, (factors.out,), op)


def _summed(columns: Sequence[Columns]) -> Op:
    """Return the operation that adds scaled columns up."""
    if len(columns) == 1:
        return Beside(parts=tuple(columns))
    return Mix(parts=tuple(each.tensor for each in columns), matrix=SmallMatrix.of([[each.scale] for each in columns]))


def step_of(name: str, dtype: DType, shape: tuple[int, ...], op: Op) -> Step:
    """Return the step that writes the tensor by the operation: copied, cast or computed, as that is."""
    parts = row_ops(op)
    action = TensorAction.COMPUTED
    if all(each.is_copy for each in parts):
        action = TensorAction.COPIED
    elif all(each.keeps_values for each in parts):
        action = TensorAction.CAST
    out = TensorSpec(name=name, dtype=dtype, shape=shape)
    return Step(out=out, op=op, action=action, reason=str(op))


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
