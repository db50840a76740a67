"""The steps that write one module's factors: stacked, or multiplied by small matrices that lower the rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from lora_tool.core.display import counted, named
from lora_tool.core.errors import WrongValue
from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import FLOAT_NAMES, DType, StoredTensor, TensorAction, TensorSpec
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.plans.algebra.ranks import ModuleRank
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


# Warns where a type rounds small factors away: below its normal numbers, those that it has are all equally far apart.


_APART = {DType.F16: 2.0**-24, DType.BF16: 2.0**-133, DType.F32: 2.0**-149, DType.F64: 5e-324}
"""The distance of the smallest numbers, which is the least of them."""
_WARNED, _REFUSED = 0.01, 0.5
"""Shares of a factor's norm that rounding takes."""
_TINY = 1e-20
"""A scale that may take trained values below what types other than float16 have."""


def small_warnings(sums: Sequence[Factors], dtype: DType, ranks: Iterable[ModuleRank] = ()) -> Iterator[str]:
    """Yield a warning where `dtype` rounds factors by more than a hundredth, since its numbers are too far apart.

    `ranks` are the modules that get other factors of a lower rank. The factors are read only where that can happen: for
    float16, and for very small scales. Raises `WrongValue` where it takes half of a factor, `OSError`, `SourceChanged`.
    """
    scales = [abs(term.scale) for each in sums for term in each.terms if term.scale]
    if dtype is not DType.F16 and min(scales, default=1.0) > _TINY:
        return
    lower = {each.module: each for each in ranks if each.after < each.before}
    shares = dict(_shares(sums, dtype, lower))
    found = {module: share for module, share in shares.items() if share > _WARNED}
    if not found:
        return
    worst = max(found, key=found.__getitem__)
    name = FLOAT_NAMES[dtype]
    message = (
        f"{name} has no numbers between 0 and {_APART[dtype]:.1g}: in {len(found)} of {counted(len(shares), 'module')} it "
        f"rounds a factor by more than {_WARNED:.0%} of its size, by {found[worst]:.0%} in {named([worst])}"
    )
    if found[worst] >= _REFUSED:
        raise WrongValue(message, hint="`dtype=float32`" if dtype is DType.F16 else "weights that are not that small")
    yield f"{message}; {FLOAT_NAMES[DType.F64 if dtype is DType.F32 else DType.F32]} does not"


def _shares(sums: Sequence[Factors], dtype: DType, lower: Mapping[str, ModuleRank]) -> Iterator[tuple[str, float]]:
    """Yield each module and the larger share that rounding takes of the norm of A or B."""
    from lora_tool.plans.algebra.spectrum import Reader  # numpy, only where values are read

    with OpenFiles(opened_regular) as files:
        reader = Reader(files=files)
        for each in sums:
            if each.module in lower:
                # ‖A‖² = ‖B‖² = Σσ, which is at least ‖ΔW‖ = √Σσ²
                rank, norm = lower[each.module].after, math.sqrt(lower[each.module].energy)
                sizes = [(rank * max(each.out, each.width), norm)]
            else:
                sizes = [
                    (part.spec.numel, scale**2 * float(reader.gram((part,), below=below).trace()))
                    for term in each.terms
                    for part, scale, below in ((term.a, 1.0, True), (term.b, term.scale, False))
                    if scale != 1 or part.dtype is not dtype
                ]
            yield each.module, max((_share(_APART[dtype], *size) for size in sizes), default=0.0)


def _share(apart: float, numel: int, norm: float) -> float:
    """Return the share of the norm that rounding `numel` values with the squared `norm` to multiples of `apart` takes.

    The errors of many values are spread evenly over that distance, so that their mean square is apart²/12.
    """
    return min(1.0, apart * math.sqrt(numel / 12 / norm)) if norm > 0 else 0.0


_LITTLE = 0.05
"""A share of the sum of the terms' norms. A smaller ΔW loses a tenth when both factors are rounded to bfloat16."""
_SMALL = 16 << 20
"""Up to so many bytes of factors every module is checked; of larger adapters only `_SOME`."""
_SOME = 4


def cancel_warnings(sums: Sequence[Factors]) -> Iterator[str]:
    """Yield a warning where ‖ΔW‖ is a small share of the sum of the norms of its terms, from Gram matrices.

    Checks all modules of small adapters, and a few of large ones, evenly spaced. Raises `OSError`, `SourceChanged`.
    """
    several = [each for each in sums if len(each.terms) > 1]
    if not several:
        return
    if sum(part.nbytes for each in several for part in (*each.a_parts, *each.b_parts)) > _SMALL:
        last = len(several) - 1
        several = [several[at * last // (_SOME - 1)] for at in range(_SOME)] if last >= _SOME else several
    shares = dict(_kept_shares(several))
    little = sorted((share, module) for module, share in shares.items() if share < _LITTLE)
    if little:
        share, module = little[0]
        checked = "" if len(shares) == len(sums) else " that were looked at"
        yield (
            f"the adapters nearly cancel: in {len(little)} of {counted(len(shares), 'module')}{checked} ‖ΔW‖ of the sum is "
            f"below {_LITTLE:.0%} of what its terms are by themselves, in {module} {100 * share:.2g}%; a server "
            "that computes in 16 bits loses much of that to rounding"
        )


def _kept_shares(sums: Sequence[Factors]) -> Iterator[tuple[str, float]]:
    """Yield each module and ‖ΔW‖ as a share of the sum of its terms' norms."""
    from lora_tool.plans.algebra.spectrum import (
        Reader,  # numpy, only where values are read
        grams_and_scales,
        left_of_terms,
    )

    with OpenFiles(opened_regular) as files:
        reader = Reader(files=files)
        for each in sums:
            share = left_of_terms(*grams_and_scales(each, reader), each)
            if math.isfinite(share):
                yield each.module, share
