"""What a change of ranks does to each module, in figures that are known before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from msgspec import Struct

from lora_tool.core.display import counted

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
        """The share of what was to be kept."""


class ModuleRank(Struct, frozen=True, kw_only=True):
    """One module's ΔW before and after."""

    module: str
    before: int
    """The ranks of all terms together."""
    after: int
    energy: float
    """‖ΔW‖²."""
    discarded: float
    """What of it is left out."""
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


def _total_kept(modules: Sequence[ModuleRank]) -> float:
    """Return the share of the sum of all ‖ΔW‖² that is kept."""
    energy = math.fsum(each.energy for each in modules)
    return 1 - math.fsum(each.discarded for each in modules) / energy if energy else 1.0


def rank_lines(modules: Sequence[ModuleRank]) -> Iterator[str]:
    """Yield the summary: how much is kept, where the least is, and which rank would do."""
    yield f"kept {_total_kept(modules):.4%} of ‖ΔW‖²; the least in {least_kept(modules)}"
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
