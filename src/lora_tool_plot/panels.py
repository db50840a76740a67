"""The panels that pictures are made of, each drawn on axes of its own: on a sheet among others, or alone on a page."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from lora_tool.workflows.inspection.curves import Curves, is_main
from lora_tool.workflows.inspection.spectra import Spectrum
from lora_tool.workflows.inspection.targets import place, short_names
from lora_tool_plot.grid import PanelGrid
from lora_tool_plot.theme import (
    AROUND,
    HEAT,
    INK,
    NOT_A_NUMBER,
    ONE,
    SHADE,
    SOFT,
    TWO,
    cut,
    depth_colour,
    logarithmic_ticks,
    number_axis,
    plain,
    short_number,
    title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINES = 16
"""Most lines of a panel of spectra: of more layers, neighbours are drawn as one."""
_POINTS = 64
"""Most points of such a line."""
_PANELS = 12
"""Most targets whose spectra are drawn."""
_FLOOR = 1e-6
"""Share of the largest singular value of a module below which the others are rounding, and its line ends."""
_CURVES = 48
"""Most panels of what a run logged."""
_MANY = 120
"""Points from which a curve is drawn thin, with its mean over neighbours on it."""
_WITH_LINES = 48
"""Most layers of a heat map with lines between its cells."""
ROW_LETTERS = 34
"""Most letters of a row's name beside a heat map."""
_FEW = 40
"""Points up to which each is a dot."""
_ENERGY = 0.9


class Line(Struct, frozen=True, kw_only=True):
    """A line of a panel of spectra: the median of a few neighbouring layers."""

    share: float | None
    """The layers' place among all, from 0 to 1; None for a module in no layer."""
    values: tuple[float, ...]
    """Singular values by k; NaN for infinities, and for values that are rounding alone."""


class SpectraPanel(Struct, frozen=True, kw_only=True):
    """The spectra of one target in all layers."""

    name: str
    rank: int
    lines: tuple[Line, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """The least and largest singular value by k."""
    enough: int | None
    """How many singular values hold 90 % of ‖ΔW‖², in the median of the modules; None where every ΔW is zero."""


def spectra_sentence(spectra: Sequence[Spectrum]) -> str:
    """Return what the panels of spectra show and what is good."""
    layers = len({item.layer for item in spectra if item.layer is not None})
    each = "each layer" if layers <= _LINES else f"every {math.ceil(layers / _LINES)} layers (their median)"
    lines = f", a line for {each}, dark for the first and bright for the last" if layers > 1 else ""
    return (
        f"Singular values of ΔW, largest first{lines}. Good: lines that fall far by the last k. A flat line uses the "
        "whole rank, and a larger one may help."
    )


def spectra_panels(spectra: Sequence[Spectrum]) -> tuple[SpectraPanel, ...]:
    """Return a panel for each target, in the order of the tables; of very many, the ones that moved furthest.

    None where no ΔW has a second direction or a length: there is nothing to see that a heat map does not show.
    """
    if all(item.rank == 1 or not item.norm for item in spectra):
        return ()
    names = short_names({item.target for item in spectra})
    groups: dict[str, list[Spectrum]] = defaultdict(list)
    for item in spectra:
        groups[item.target].append(item)
    layers = sorted({item.layer for item in spectra if item.layer is not None})
    furthest = sorted(groups, key=lambda target: -max(_number(item.norm) for item in groups[target]))[:_PANELS]
    return tuple(_spectra_panel(names[target], groups[target], layers) for target in sorted(furthest, key=place))


def _spectra_panel(name: str, items: Sequence[Spectrum], layers: Sequence[int]) -> SpectraPanel:
    rank = max(item.rank for item in items)
    table = {id(item): _padded(item, rank) for item in items}
    every = np.array(list(table.values()))
    of_layer: dict[float | None, list[np.ndarray]] = defaultdict(list)
    bands = min(_LINES, len(layers))
    shares = {layer: at * bands // len(layers) / max(bands - 1, 1) for at, layer in enumerate(layers)}
    for item in items:
        of_layer[None if item.layer is None else shares[item.layer]].append(table[id(item)])
    enough = [k for item in items if (k := _enough(item)) is not None]
    return SpectraPanel(
        name=name,
        rank=rank,
        lines=tuple(Line(share=share, values=tuple(_over(np.nanmedian, rows))) for share, rows in of_layer.items()),
        low=tuple(_over(np.nanmin, every)),
        high=tuple(_over(np.nanmax, every)),
        enough=round(statistics.median(enough)) if enough else None,
    )


def _padded(item: Spectrum, rank: int) -> np.ndarray:
    least = _FLOOR * max(map(_number, item.singular_values), default=0.0)
    values = [value if least < value < math.inf else math.nan for value in item.singular_values]
    return np.array(values + [math.nan] * (rank - len(values)))


def _over(what: Callable[..., np.ndarray], rows: Sequence[np.ndarray] | np.ndarray) -> list[float]:
    """Return `what` numpy makes of each column, NaN of a column without a number."""
    table = np.array(rows)
    there = ~np.isnan(table).all(axis=0)
    found = np.full(table.shape[1], math.nan)
    found[there] = what(table[:, there], axis=0)
    return [float(value) for value in found]


def _enough(item: Spectrum) -> int | None:
    with np.errstate(all="ignore"):  # what overflows has no share
        squares = np.square(item.singular_values)
    total = squares.sum()
    return int(np.searchsorted(np.cumsum(squares) / total, _ENERGY) + 1) if 0 < total < math.inf else None


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def value_range(panels: Sequence[SpectraPanel]) -> tuple[float, float] | None:
    """Return the least and largest singular value that is drawn, None where none is."""
    there = [value for panel in panels for value in (*panel.low, *panel.high) if not math.isnan(value)]
    return (min(there), max(there)) if there else None


def draw_spectra(axes: Axes, panel: SpectraPanel, ends: tuple[float, float] | None) -> None:
    """Draw the spectra of one target; all panels have the same `ends`, so that they can be compared."""
    k = np.arange(1, panel.rank + 1)
    shown = np.unique(np.linspace(0, panel.rank - 1, min(panel.rank, _POINTS)).round().astype(int))
    axes.fill_between(k[shown], np.array(panel.low)[shown], np.array(panel.high)[shown], color=SHADE, linewidth=0)
    for line in sorted(panel.lines, key=lambda line: line.share or 0.0):
        colour, marker = INK if line.share is None else depth_colour(line.share), "o" if panel.rank == 1 else None
        axes.plot(k[shown], np.array(line.values)[shown], color=colour, linewidth=1.1, marker=marker, markersize=3)
    if ends is not None:
        axes.set_yscale("log")
        low, high = ends[0] / 1.3, ends[1] * 1.3
        axes.set_ylim(low, high)
        axes.set_yticks(logarithmic_ticks(low, high))
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter(short_number)
    axes.set_xlim(0.5, panel.rank + 0.5)
    number_axis(axes, "x", whole=True)
    axes.grid(axis="y")
    title(axes, panel.name)
    if panel.enough is not None:
        axes.axvline(panel.enough, ymax=0.87, color=SOFT, linewidth=0.8, linestyle=(0, (3, 2)))
        said = f"90 % of ‖ΔW‖² in {panel.enough} of {panel.rank}"
        axes.text(0.98, 0.97, said, transform=axes.transAxes, ha="right", va="top", fontsize=7.5, color=SOFT)


def draw_heat_map(axes: Axes, scale: Axes, grid: PanelGrid) -> None:
    """Draw the cells, and on the axes `scale` beside them the colours with their numbers."""
    colours = HEAT if grid.centre is None else AROUND
    positions = [[grid.position(cell) for cell in row] for row in grid.cells]
    table = np.array([[math.nan if at is None else at for at in row] for row in positions], dtype=float)
    table = table.reshape(len(grid.rows), len(grid.columns))
    # cells of a millimetre have no room for lines between them, and without any PDF readers show the ground there
    edge, width = ("white", 0.6) if len(grid.columns) <= _WITH_LINES else ("face", 0.3)
    axes.pcolormesh(np.ma.masked_invalid(table), cmap=colours, vmin=0, vmax=1, edgecolors=edge, linewidth=width)
    for row, cells in enumerate(grid.cells):
        for column, cell in enumerate(cells):
            if cell is not None and not math.isfinite(cell):
                axes.fill_between([column, column + 1], row, row + 1, color=NOT_A_NUMBER, hatch="///", linewidth=0)
    axes.invert_yaxis()
    places = labelled(grid.columns, 24)
    axes.set_xticks([at + 0.5 for at in places], [grid.columns[at] for at in places])
    axes.set_yticks([at + 0.5 for at in range(len(grid.rows))], [plain(cut(row, ROW_LETTERS)) for row in grid.rows])
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("layer")
    steps = np.linspace(0, 1, 128).reshape(-1, 1)
    scale.pcolormesh([0, 1], np.linspace(0, 1, 129), steps, cmap=colours, vmin=0, vmax=1, rasterized=True)
    scale.set_xticks([])
    scale.yaxis.tick_right()
    marks = [(grid.position(value), value) for value in grid.marks]
    scale.set_yticks([at or 0.0 for at, _ in marks], [short_number(value) for _, value in marks])
    scale.tick_params(length=0)
    for spine in scale.spines.values():
        spine.set_visible(False)


def labelled(columns: Sequence[str], room: int) -> list[int]:
    """Return the places of the columns that get their number, where there is `room` for so many: every so manyth, a
    round step, the last layer, and what lies in no layer.
    """
    count = len(columns)
    step = next(step for step in (1, 2, 4, 5, 8, 10, 20, 40, 50, 100, 200, 500, 1000, count) if count <= step * room)
    layers = count - (columns[-1:] == ("–",))
    places = list(range(0, layers, step))
    if places and layers - 1 > places[-1]:
        places[-1 if len(places) > 1 and 2 * (layers - 1 - places[-1]) <= step else len(places) :] = [layers - 1]
    return [*places, *range(layers, count)]


class CurvePanel(Struct, frozen=True, kw_only=True):
    """What belongs in one panel: a quantity in training, and the same in evaluation."""

    name: str
    main: bool
    lines: Mapping[str, tuple[tuple[float, float], ...]]
    """"training" or the name of an evaluation → (step, value)."""


def curves_sentence(curves: Curves) -> str:
    """Return what is good about curves, and whether some are not drawn."""
    left = len(_panels(curves)) - _CURVES
    return (
        "Good: the loss falls and levels off, accuracy and margins rise, and evaluation follows training. Where "
        "evaluation turns back, the run begins to overfit."
    ) + (f" {left:,} more curves were logged; lora-tool inspect --json lists them." if left > 0 else "")


def curve_panels(curves: Curves) -> tuple[CurvePanel, ...]:
    """Return the panels, those that runs are judged by first; an evaluation is in the panel of what it evaluates.

    Of very many, the first.
    """
    return _panels(curves)[:_CURVES]


def _panels(curves: Curves) -> tuple[CurvePanel, ...]:
    panels: dict[str, dict[str, tuple[tuple[float, float], ...]]] = {}
    for name, points in curves.items():
        if not name.startswith("eval_"):
            panels[name] = {"training": points}
    for name, points in curves.items():
        if name.startswith("eval_"):
            rest = name.removeprefix("eval_")
            of = max((other for other in panels if rest == other or rest.endswith(f"_{other}")), key=len, default=name)
            label = " ".join(filter(None, ("evaluation", rest.removesuffix(of).rstrip("_") if of != name else "")))
            panels.setdefault(of, {})[label] = points
    order = list(curves)
    names = sorted(panels, key=lambda name: (not is_main(name), order.index(name)))
    return tuple(CurvePanel(name=name, main=is_main(name), lines=panels[name]) for name in names)


def draw_curve(axes: Axes, panel: CurvePanel) -> None:
    """Draw what was logged; of many points their mean over neighbours stands out."""
    for at, (label, points) in enumerate(panel.lines.items()):
        steps, values = (np.array(each) for each in zip(*points, strict=True))
        colour, line = (ONE, TWO)[min(at, 1)], ("-", "-", "--", ":")[min(at, 3)]
        if len(values) >= _MANY:
            axes.plot(steps, values, linewidth=0.7, alpha=0.35, color=colour)
            values = _smooth(values)
        dot = "o" if len(values) <= _FEW else None
        (drawn,) = axes.plot(steps, values, line, color=colour, linewidth=1.6, marker=dot, markersize=2.6, label=label)
        drawn.set_clip_on(False)  # what lies on an edge is drawn whole
    title(axes, panel.name)
    axes.grid(axis="y")
    axes.margins(x=0.02, y=0.08)
    if "accurac" in panel.name and all(value <= 1 for points in panel.lines.values() for _, value in points):
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.0))
    number_axis(axes, "y", 5 if panel.main else 4)
    number_axis(axes, "x", 6 if panel.main else 3, whole=True)
    if len(panel.lines) > 1:
        axes.legend(loc="best", handlelength=1.2)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return the mean over the neighbours of each value; fewer at the ends."""
    half = max(2, len(values) // 60)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    begin, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return np.asarray((sums[end] - sums[begin]) / (end - begin))
