"""Warns where a type rounds small factors away: below its normal numbers, those that it has are all equally far apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lora_tool.core.display import counted, named
from lora_tool.core.errors import WrongValue
from lora_tool.core.tensors import FLOAT_NAMES, DType
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.plans.algebra.ranks import ModuleRank
from lora_tool.plans.algebra.terms import Factors

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
