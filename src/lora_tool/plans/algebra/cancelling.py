"""Warns where the terms of a sum nearly cancel: then ΔW is a small difference of large numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lora_tool.core.display import counted
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.plans.algebra.terms import Factors

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
    shares = dict(_shares(several))
    little = sorted((share, module) for module, share in shares.items() if share < _LITTLE)
    if little:
        share, module = little[0]
        checked = "" if len(shares) == len(sums) else " that were looked at"
        yield (
            f"the adapters nearly cancel: in {len(little)} of {counted(len(shares), 'module')}{checked} ‖ΔW‖ of the sum is "
            f"below {_LITTLE:.0%} of what its terms are by themselves, in {module} {100 * share:.2g}%; a server "
            "that computes in 16 bits loses much of that to rounding"
        )


def _shares(sums: Sequence[Factors]) -> Iterator[tuple[str, float]]:
    """Yield each module and ‖ΔW‖ as a share of the sum of its terms' norms."""
    from lora_tool.plans.algebra.grams import Reader  # numpy, only where values are read
    from lora_tool.plans.algebra.spectrum import grams_and_scales, left_of_terms

    with OpenFiles(opened_regular) as files:
        reader = Reader(files=files)
        for each in sums:
            share = left_of_terms(*grams_and_scales(each, reader), each)
            if math.isfinite(share):
                yield each.module, share
