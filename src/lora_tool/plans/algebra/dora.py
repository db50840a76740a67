"""DoRA's change of a weight, and the product of low rank that is nearest to it.

DoRA makes f·(W + s·B·A) of W, with f = m/‖W + s·B·A‖ of each row (https://arxiv.org/abs/2402.09353), so its change is
(f - 1)·W + f·s·B·A: of full rank wherever a magnitude m moved.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from lora_tool.core.errors import IncompatibleBase
from lora_tool.core.tensors import StoredTensor
from lora_tool.plans.algebra.ranks import ModuleRank
from lora_tool.plans.algebra.spool import Spool
from lora_tool.plans.algebra.terms import Factors, Term
from lora_tool.plans.core.operation import rows_of

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK = 1 << 19


def nearest_to_dora(
    factors: Factors, magnitude: StoredTensor, weight: StoredTensor, spool: Spool, *, rank: int
) -> tuple[Factors, ModuleRank]:
    """Return the product of `rank` at most that is nearest to what DoRA changes, and how near that is.

    `weight` is W, [out, in]. Raises `IncompatibleBase` where sizes differ, `UnsupportedAdapter` for NaN and infinity.
    """
    import numpy as np  # numpy, only where values are read

    from lora_tool.formats.stored_numbers import numbers
    from lora_tool.plans.algebra.krylov import nearest_to

    (term,) = factors.terms
    if weight.shape != (factors.out, factors.width) or magnitude.spec.numel != factors.out:
        raise IncompatibleBase(
            f"`{factors.module}` is {list(weight.shape)} in {weight.path.parent}, [{factors.out}, {factors.width}] in the adapter",
            hint="lora-tool cannot approximate DoRA on a layer that is stored [in, out]; merge it: "
            f"lora-tool merge {shlex.quote(str(term.a.path.parent))}",
        )
    left, right = numbers(term.b) * term.scale, numbers(term.a)
    sizes = numbers(magnitude).reshape(-1)
    step = max(1, _BLOCK // max(1, factors.width))

    def changes() -> Iterator[npt.NDArray[Any]]:
        for at in range(0, factors.out, step):
            some = slice(at, min(at + step, factors.out))
            before = numbers(rows_of(weight, at, some.stop - at))
            moved = before + left[some] @ right
            moved *= (sizes[some] / np.linalg.norm(moved, axis=1))[:, None]
            yield (moved - before).astype(np.float32)

    with np.errstate(all="ignore"):  # NaN and infinity are refused by name
        near = nearest_to(changes, weight.shape, f"{weight.path}: what DoRA makes of `{weight.name}`", rank=rank)
    a, b = (spool.add(f"{factors.module}.dora_{part}", each) for part, each in (("A", near.a), ("B", near.b)))
    figures = ModuleRank(
        module=factors.module,
        before=min(weight.shape),
        after=near.rank,
        energy=near.norm**2,
        discarded=near.residual**2,
        largest=near.largest,
        enough=near.enough or min(weight.shape),
    )
    return replace(factors, terms=(Term(a=a, b=b, scale=1.0),)), figures
