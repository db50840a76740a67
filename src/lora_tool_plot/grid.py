"""One number per module, laid out as targets by layers: the data of a heat map, its scale, and what is good."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.display import four_digits
from lora_tool.workflows.inspection.spectra import Spectrum
from lora_tool.workflows.inspection.targets import place, short_names

_FLAT = 0.05
"""Share of the largest number within which all are alike: colours would show nothing but noise."""
_ROWS = 80
"""Most rows of a map."""
_DECADES = 30.0
"""How far apart the ends of a scale may be before most of its cells would have the colour of its lower end."""


_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_POWERS = (1.0, 2.0, 5.0, 10.0)
_TIMES = (1.25, 2.0, 4.0, *(10.0**power for power in range(1, 31)))
"""What a round number begins with, on a linear scale and on a logarithmic one; ratios that both ends are round of."""


def rounded_up(value: float, begins: Sequence[float]) -> float:
    """Return the least round number that is no less than `value`, one that `begins` so, times a power of ten; the value
    itself where none is a float, 0 for what is not above 0.
    """
    if not 0 < value < math.inf:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    found = power * next((each for each in begins if value <= each * power * (1 + 1e-9)), begins[-1])
    return found if 0 < found < math.inf else value


def rounded_down(value: float, begins: Sequence[float]) -> float:
    """Return the largest round number that is no more than `value`, which is above 0, in the same way."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * max((each for each in begins if each * power * (1 - 1e-9) <= value), default=begins[0]) or value


class PanelGrid(Struct, frozen=True, kw_only=True, dict=True):
    """`cells[row][column]` is the number of target `rows[row]` in layer `columns[column]`; None where there is none."""

    title: str
    unit: str
    """What the numbers are, in a few signs."""
    sentence: str
    """What the picture shows and what is good."""
    flat: str = ""
    """What is said instead of a picture that would be of one colour; empty where there is one."""
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    crowded: bool = False
    """Whether a cell stands for several modules, experts of one layer, and has the largest of their numbers."""
    centre: float | None = None
    """The number that means no difference, which has the pale middle of a scale of two colours."""
    limits: tuple[float, float] | None = None
    """The least and largest number that there can be, where both are known: the ends of the colour scale."""

    @cached_property
    def least(self) -> float:
        """The least of all finite numbers."""
        return min(finite(self.cells), default=0.0)

    @cached_property
    def most(self) -> float:
        """The largest of all finite numbers."""
        return max(finite(self.cells), default=0.0)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The round numbers at the ends of the colour scale.

        A scale begins at 0, or is logarithmic, so that numbers that are nearly alike have nearly one colour; around a
        centre it reaches as many times below as above.
        """
        if self.limits is not None:
            return self.limits
        if self.centre is not None:
            times = max(self.most / self.centre, self.centre / self.least if self.least > 0 else math.inf)
            factor = next((step for step in _TIMES if times <= step), _TIMES[-1])
            return self.centre / factor, self.centre * factor
        if self.logarithmic:
            return rounded_down(self.least, _POWERS), rounded_up(self.most, _POWERS)
        return 0.0, rounded_up(self.most, _ROUND)

    @property
    def said(self) -> str:
        """The sentence that stands above the picture, or in its place."""
        several = " Each cell shows the largest value of its layer's experts." if self.crowded else ""
        return self.flat or self.sentence + several + (
            " The colours are logarithmic." if self.logarithmic and self.centre is None else ""
        )

    @property
    def logarithmic(self) -> bool:
        """Whether equal steps of colour are equal ratios."""
        if self.limits is not None:
            return False
        return self.centre is not None or (self.least > 0 and self.most / self.least > _DECADES)

    def position(self, value: float | None) -> float | None:
        """Return where on the colour scale the value is, from 0 to 1; None for NaN, infinities and no value."""
        if value is None or not math.isfinite(value):
            return None
        low, high = self.ends
        if low == high:
            return 0.5
        value = min(max(value, low), high)
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)

    @property
    def marks(self) -> tuple[float, ...]:
        """The numbers that stand at the colour scale: its ends, its centre or middle, or powers of ten."""
        low, high = self.ends
        if self.centre is not None:
            return low, self.centre, high
        if not self.logarithmic:
            return (low, high) if self.limits is not None else (low, high / 2, high)
        powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)))]
        room = 0.1 * math.log(high / low)
        return low, *(each for each in powers if math.log(each / low) > room and math.log(high / each) > room), high


class Placed(Protocol):
    """Whatever belongs to a module: its path without its layer, and the layer."""

    @property
    def target(self) -> str: ...
    @property
    def layer(self) -> int | None: ...


Item = TypeVar("Item", bound=Placed)


def grids(spectra: Iterable[Spectrum]) -> tuple[PanelGrid, ...]:
    """Return the heat maps of an adapter: how far each module moved, and in how many directions.

    The first is ‖ΔW‖/‖W‖ where the base's norms are known for every module, else ‖ΔW‖. With a base there is a third:
    how much of ΔW is lost in rounding to the base's type.
    """
    listed = tuple(spectra)
    relative = bool(listed) and all(item.relative_norm is not None for item in listed)
    kept = any(item.kept is not None for item in listed)
    return (_moved(listed, relative=relative), _directions(listed), *([_lost(listed)] if kept else []))


def _moved(spectra: Sequence[Spectrum], *, relative: bool) -> PanelGrid:
    unit = "‖ΔW‖ / ‖W‖" if relative else "‖ΔW‖"
    than = "all far below 1, and no module stands out" if relative else "no module stands out, and none is at 0"
    return laid_out(
        spectra,
        (lambda item: item.relative_norm) if relative else (lambda item: item.norm),
        title="How far training moved each weight",
        unit=unit,
        sentence=f"{unit} of every module. Good: {than}. A module at 0 was not trained; a single bright module took "
        "all of the change.",
        flat=lambda least, most: (
            f"Every weight moved about equally: {unit} is {span(least, most)}."
            if most
            else "Nothing moved: every ΔW is zero."
        ),
    )


def _directions(spectra: Sequence[Spectrum]) -> PanelGrid:
    ranks = sorted({item.rank for item in spectra})
    title, good = "How many directions each ΔW uses", "Good: between the ends."
    ends = "Near the rank a larger one may learn more; near 1 a smaller one would do."
    if len(ranks) > 1:  # else the ranks would be the picture
        of = f"{ranks[0]} to {ranks[-1]}"
        shares = laid_out(
            spectra,
            lambda item: item.effective_rank / item.rank,
            title=title,
            unit="effective rank / rank",
            sentence=f"Effective rank of every ΔW as a share of its rank, which is {of}. {good} "
            "Near 1 a larger rank may learn more; near 0 a smaller one would do.",
            flat=lambda least, most: f"Every ΔW uses {span(least, most)} of its rank, which is {of}.",
        )
        return replace(shares, limits=(0.0, 1.0))
    (rank,) = ranks or (1,)
    directions = laid_out(
        spectra,
        lambda item: item.effective_rank,
        title=title,
        unit=f"effective rank, of {rank}",
        sentence=f"Effective rank of every ΔW; its rank is {rank}. {good} {ends}",
        flat=lambda least, most: (
            f"The effective rank of every ΔW is {span(least, most)}; its rank is {rank}."
            if most
            else "Every ΔW is zero and has no direction."
        ),
    )
    return replace(directions, limits=(1.0, float(rank)))


def _lost(spectra: Sequence[Spectrum]) -> PanelGrid:
    unit = "1 − cosine"
    enough = 0.01
    return laid_out(
        spectra,
        lambda item: None if item.kept is None else max(1.0 - item.kept, 0.0) if item.kept == item.kept else math.nan,
        title="How much rounding after a merge loses",
        unit=unit,
        sentence="1 − cosine between ΔW and the part of it that remains in the base's dtype. Good: below 0.01. Near "
        "1, rounding removes all of ΔW: merge with --dtype float32.",
        flat=lambda _, most: f"Rounding to the base's dtype keeps every ΔW: {unit} is at most {four_digits(most)}.",
        is_flat=lambda least, most: most <= enough or most - least <= _FLAT * most,
    )


def span(least: float, most: float) -> str:
    """Return two numbers as one range, or one number."""
    low, high = four_digits(least), four_digits(most)
    return low if low == high else f"{low} to {high}"


def alike(least: float, most: float) -> bool:
    """Return whether numbers from `least` to `most` are one number for all that a picture can show."""
    return most - least <= _FLAT * abs(most)


def finite(cells: Iterable[Iterable[float | None]]) -> tuple[float, ...]:
    """Return the cells that are numbers."""
    return tuple(cell for row in cells for cell in row if cell is not None and math.isfinite(cell))


def laid_out(
    items: Sequence[Item],
    value: Callable[[Item], float | None],
    *,
    title: str,
    unit: str,
    sentence: str,
    flat: Callable[[float, float], str],
    is_flat: Callable[[float, float], bool] = alike,
) -> PanelGrid:
    """Return the values by target and layer, targets as a layer computes them; several of one cell are the largest.

    `flat` is the sentence for a map from least to most that `is_flat`.
    """
    names = short_names({item.target for item in items})
    layers = sorted({item.layer for item in items if item.layer is not None})
    columns: tuple[int | None, ...] = (*layers, *([None] if any(item.layer is None for item in items) else []))
    held: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for item in items:
        number = value(item)
        if number is not None:
            held[item.target, item.layer].append(number)
    every = {row: tuple(_largest(held[row, column]) for column in columns) for row in names}
    highest = sorted(every, key=lambda row: -max(finite([every[row]]), default=math.inf))[:_ROWS]
    rows = [row for row in sorted(dict.fromkeys(item.target for item in items), key=place) if row in highest]
    cells = tuple(every[row] for row in rows)
    if len(every) > _ROWS:
        sentence = f"{sentence} Of {len(every):,} rows the {_ROWS} with the largest numbers are shown."
    numbers = finite(every.values())
    broken = any(cell is not None and not math.isfinite(cell) for row in every.values() for cell in row)
    shows_nothing = numbers and not broken and is_flat(min(numbers), max(numbers))
    return PanelGrid(
        title=title,
        unit=unit,
        sentence=sentence,
        flat=flat(min(numbers), max(numbers)) if shows_nothing else "",
        rows=tuple(names[row] for row in rows),
        columns=tuple("–" if column is None else str(column) for column in columns),
        cells=cells,
        crowded=any(len(several) > 1 for several in held.values()),
    )


def _largest(values: Sequence[float]) -> float | None:
    """Return the largest value, NaN where one is NaN; None of none."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)
