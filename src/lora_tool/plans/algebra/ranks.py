"""The effect of lower ranks on each module, in figures that are known before anything is written."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from msgspec import Struct, field

from lora_tool.adapters.experts import EXPERT, PROJECTIONS
from lora_tool.core.choices import positive
from lora_tool.core.display import counted
from lora_tool.core.errors import WrongValue
from lora_tool.core.keys import without_numbers
from lora_tool.core.machine import factor_workers
from lora_tool.core.progress import told
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.core.factor_ops import SmallMatrix

_ENOUGH = 0.99
"""The share of ‖ΔW‖² by which ranks are compared."""
_LITTLE = 0.9
"""A module that keeps less than this share is worth a warning."""
_WORST = 3


class Kept(Protocol):
    """A module's figures, of whatever computation, that tell how much of its ΔW is kept."""

    @property
    def module(self) -> str:
        """Its path."""

    @property
    def kept(self) -> float:
        """The share that is kept of the change."""

    @property
    def energy(self) -> float:
        """The square of the change's norm."""


class ModuleRank(Struct, frozen=True, kw_only=True):
    """One module's ΔW before and after."""

    module: str
    before: int
    """The ranks of all terms together."""
    after: int
    energy: float
    """‖ΔW‖²."""
    discarded: float
    """The part of it that is left out."""
    largest: float
    """The largest singular value."""
    enough: int
    """The rank that keeps 99 % of ‖ΔW‖²."""

    @property
    def kept(self) -> float:
        """The share of ‖ΔW‖² that is kept; all of a ΔW that is zero."""
        return 1 - self.discarded / self.energy if self.energy else 1.0

    @property
    def error(self) -> float:
        """‖ΔW' - ΔW‖/‖ΔW‖."""
        return math.sqrt(self.discarded / self.energy) if self.energy else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "module": self.module,
            "rank_before": self.before,
            "rank": self.after,
            "kept": self.kept,
            "error": self.error,
            "norm": math.sqrt(self.energy),
            "largest_singular_value": self.largest,
            "rank_for_99_percent": self.enough,
        }


def enough() -> float:
    """Return the share of ‖ΔW‖² that `ModuleRank.enough` is for."""
    return _ENOUGH


def total_kept(modules: Sequence[Kept]) -> float:
    """Return the share of the sum of all ‖ΔW‖² that is kept; all where nothing is left out."""
    energy = math.fsum(each.energy for each in modules)
    return math.fsum(each.kept * each.energy for each in modules) / energy if energy else 1.0


def rank_lines(modules: Sequence[ModuleRank]) -> Iterator[str]:
    """Yield the summary: how much is kept, where the least is, and which rank would do."""
    yield f"kept {total_kept(modules):.4%} of ‖ΔW‖²; the least in {least_kept(modules)}"
    ranks = [each.enough for each in modules]
    yield (
        f"rank for {_ENOUGH:.0%} of ‖ΔW‖²: {sorted(ranks)[len(ranks) // 2]} in the median of "
        f"{counted(len(modules), 'module')}, {max(ranks)} at most; written: {_span([each.after for each in modules])}, "
        f"before: {_span([each.before for each in modules])}"
    )


def least_kept(modules: Sequence[Kept]) -> str:
    """Return the modules that keep least, each with its share."""
    worst = sorted(modules, key=lambda each: (each.kept, each.module))[:_WORST]
    return ", ".join(f"{each.module} {each.kept:.2%}" for each in worst)


def keeping_little(modules: Sequence[Kept], share: float, what: str) -> str | None:
    """Return how many modules keep less than `share` of `what`, and which the least; None where none does."""
    lost = [each for each in modules if each.kept < share]
    if not lost:
        return None
    worst = min(lost, key=lambda each: each.kept)
    return (
        f"{counted(len(lost), 'module')} of {len(modules)} keep less than {share:.0%} of {what}, {worst.module} only "
        f"{worst.kept:.1%}"
    )


def rank_warnings(modules: Sequence[ModuleRank]) -> Iterator[str]:
    """Yield a warning where a module loses much, or where nothing is left of it."""
    if nothing := [each.module for each in modules if not each.energy]:
        yield f"ΔW of {counted(len(nothing), 'module')} of {len(modules)} is zero, such as {nothing[0]}: it cancels, or was never trained"
    if (lost := keeping_little(modules, _LITTLE, "‖ΔW‖²")) is not None:
        yield f"{lost}: `keep={_ENOUGH}` chooses each rank by the share that it keeps"


def _span(ranks: Sequence[int]) -> str:
    low, high = min(ranks), max(ranks)
    return f"{low}" if low == high else f"{low} to {high}"


# The ranks of LoRA on single experts: PEFT stacks the factors of all of a layer's experts, which need one rank for that.


def largest_of_experts(ranks: Mapping[str, int]) -> int | None:
    """Return the largest rank of the modules that are matrices of single experts; None where none is."""
    return max((rank for module, rank in ranks.items() if EXPERT.fullmatch(module)), default=None)


def equal_for_experts(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the ranks of modules, that of each expert's matrix raised to the largest of them."""
    largest = largest_of_experts(ranks)
    return {
        module: rank if largest is None or not EXPERT.fullmatch(module) else largest for module, rank in ranks.items()
    }


def missing_experts(
    modules: Iterable[str], known: Iterable[str], *, as_peft: bool = True
) -> Iterator[tuple[str, str | None]]:
    """Yield the `known` modules that a server also needs to stack the factors of `modules`.

    These are the other experts, in all layers, and all three matrices; PEFT needs for down only down. Each comes with
    one of `modules` that has as many columns, if there is one.
    """
    present = set(modules)
    likes: dict[tuple[str, str], str | None] = {}
    for module in sorted(present):
        if match := EXPERT.fullmatch(module):
            experts = without_numbers(match["experts"])
            whole = next((each for each in PROJECTIONS if match["projection"] in each), ())
            for projection in () if as_peft and match["projection"] in whole[-1:] else whole:
                likes.setdefault((experts, projection), None)
            for projection in _as_wide(match["projection"]):
                likes[experts, projection] = likes.get((experts, projection)) or module
    for module in sorted(set(known) - present):
        match = EXPERT.fullmatch(module)
        if match and (at := (without_numbers(match["experts"]), match["projection"])) in likes:
            yield module, likes[at]


def _as_wide(projection: str) -> tuple[str, ...]:
    """Return the projections that have as many columns as this one: gate and up read the same."""
    return next(((gate, up) for gate, up, _ in PROJECTIONS if projection in (gate, up)), (projection,))


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

    from lora_tool.plans.algebra.spectrum import Compressed, Reader, compressed

    told(f"computing the singular values of {counted(len(sums), 'module')}")

    local = threading.local()

    def one(factors: Factors, rank: int | None) -> Compressed:
        if not hasattr(local, "reader"):
            local.reader = Reader(files=files)
        return compressed(factors, local.reader, rank=rank, keep=requested.keep or 1.0)

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
