"""Which modules lose rank, by which small matrices, and how much of ΔW that loses, before anything is written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec import Struct, field

from lora_tool.core.choices import positive
from lora_tool.core.display import counted
from lora_tool.core.errors import WrongValue
from lora_tool.core.machine import factor_workers
from lora_tool.core.progress import told
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.plans.algebra.ranks import ModuleRank, enough, equal_for_experts
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.core.aside import Aside
from lora_tool.plans.core.factor_ops import SmallMatrix


class Ranks(Struct, frozen=True, kw_only=True):
    """The rank of each module: a number, or the least that keeps a share of ‖ΔW‖²; with neither, all of its rank.

    Raises `WrongValue`.
    """

    rank: int | None = None
    keep: float | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.keep is not None:
            raise WrongValue("rank, keep: give one of the two, not both")
        if self.rank is not None:
            positive(self.rank)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise WrongValue(f"keep: expected a share of ‖ΔW‖² above 0 and up to 1, found {self.keep!r}")

    @property
    def exact(self) -> bool:
        """Whether nothing is left out."""
        return self.rank is None and self.keep is None


class Turned(Struct, frozen=True, kw_only=True):
    """The matrices for B and A of each module that loses rank, and figures on every module that was computed."""

    matrices: Mapping[str, tuple[SmallMatrix, SmallMatrix]] = field(default_factory=dict)
    ranks: tuple[ModuleRank, ...] = ()


def turned_to(requested: Ranks, sums: Sequence[Factors]) -> Turned:
    """Return the small matrices that take the modules to the requested ranks; none where nothing is left out.

    All factors are read once, by a few workers. Raises as `compressed`.
    """
    if requested.exact or not sums:
        return Turned()
    from threadpoolctl import threadpool_limits  # numpy, only where values are read

    from lora_tool.plans.algebra.grams import Reader
    from lora_tool.plans.algebra.spectrum import Compressed, compressed

    told(f"computing the singular values of {counted(len(sums), 'module')}")

    aside, local = Aside(), threading.local()

    def one(factors: Factors, rank: int | None) -> Compressed:
        if not hasattr(local, "reader"):
            local.reader = Reader(files=files)
        return compressed(factors, local.reader, rank=rank, keep=requested.keep or 1.0, aside=aside)

    with (
        OpenFiles(opened_regular) as files,
        threadpool_limits(limits=1, user_api="blas"),
        ThreadPoolExecutor(factor_workers()) as workers,
    ):
        chosen = list(workers.map(partial(one, rank=requested.rank), sums))
        raised = equal_for_experts({each.module: each.rank for each in chosen})
        low = [(at, raised[each.module]) for at, each in enumerate(chosen) if each.rank < raised[each.module]]
        for (at, _), found in zip(low, workers.map(lambda item: one(sums[item[0]], item[1]), low), strict=True):
            chosen[at] = found
    matrices, ranks = {}, []
    for factors, found in zip(sums, chosen, strict=True):
        if found.rank < factors.rank:
            matrices[factors.module] = (found.left, found.right)
        values = found.singular_values
        ranks.append(
            ModuleRank(
                module=factors.module,
                before=factors.rank,
                after=min(found.rank, factors.rank),
                energy=found.energy,
                discarded=found.discarded,
                largest=float(values[0]) if len(values) else 0.0,
                enough=found.rank_for(enough()),
            )
        )
    return Turned(matrices=matrices, ranks=tuple(ranks))
