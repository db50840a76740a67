"""Figures of an adapter's spectra and of a training run's curves, drawn by matplotlib without a display."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from lora_tool.display import printable
from lora_tool.errors import MissingDependency
from lora_tool.inspection.curves import Curves
from lora_tool.inspection.naming import short_names
from lora_tool.inspection.spectra import Spectrum
from lora_tool.pictures.grid import Grid

try:
    from matplotlib import color_sequences, colormaps
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise MissingDependency("matplotlib", extra="plot") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

COLOURS = "viridis"
"""Read by people who see no red or no green, and in grey."""
_SHOWN_ROWS = 40
"""Most rows and columns of a heat map that get a label of their own."""
_COLUMNS = 3
_ROW = 2.6
"""Inches of a row of training curves."""
_LINES = 12
"""Most targets that are drawn as lines with a name each."""


def colour(value: float | None, most: float) -> str:
    """Return the heat map's colour of `value` between 0 and `most` as ``#rrggbb``; grey where there is no number."""
    if value is None or not math.isfinite(value):
        return "#dddddd"
    return str(to_hex(colormaps[COLOURS](min(max(value / most, 0.0), 1.0))))


def adapter_figure(title: str, grids: Sequence[Grid], spectra: Sequence[Spectrum], curves: Curves) -> Figure:
    """Return everything on one sheet: heat maps, spectra, energy, and training curves where there are any."""
    heights = [max(2.0, 0.22 * len(grid.rows) + 1.1) for grid in grids]
    heights += [3.4] if spectra else []
    heights += [_ROW * math.ceil(len(curves) / _COLUMNS)] if curves else []
    figure = Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(_plain(title))
    parts = iter(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    for grid in grids:
        _heat_map(next(parts).subplots(), grid)
    if spectra:
        _draw_spectra(next(parts), spectra)
    if curves:
        _draw_curves(next(parts), curves)
    return figure


def spectra_figure(spectra: Sequence[Spectrum]) -> Figure:
    """Return the singular values of every target and the share of energy in the first k."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    _draw_spectra(figure, spectra)
    return figure


def curves_figure(curves: Curves) -> Figure:
    """Return what a run logged, one panel per kind."""
    figure = Figure(figsize=(11, _ROW * math.ceil(len(curves) / _COLUMNS)), layout="constrained")
    _draw_curves(figure, curves)
    return figure


def _plain(text: str) -> str:
    """Return a name from a file as matplotlib draws it as it stands: a pair of dollar signs would be mathematics."""
    return printable(text).replace("$", r"\$")


def _heat_map(axes: Axes, grid: Grid) -> None:
    cells = np.array([[np.nan if cell is None else cell for cell in row] for row in grid.cells], dtype=float)
    cells = cells.reshape(len(grid.rows), len(grid.columns))
    axes.set_title(grid.title, loc="left")
    axes.set_facecolor("#dddddd")
    if cells.size:
        drawn = axes.pcolormesh(np.ma.masked_invalid(cells), cmap=COLOURS, vmin=0, vmax=grid.most)
        axes.figure.colorbar(drawn, ax=axes, pad=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("layer")
    for ticks, labels, names in (
        (axes.set_xticks, axes.set_xticklabels, grid.columns),
        (axes.set_yticks, axes.set_yticklabels, grid.rows),
    ):
        every = math.ceil(len(names) / _SHOWN_ROWS) or 1
        ticks([at + 0.5 for at in range(0, len(names), every)])
        labels([_plain(name) for name in names[::every]])
    axes.tick_params(length=0)


def _by_target(spectra: Sequence[Spectrum]) -> Mapping[str, list[Spectrum]]:
    names = short_names({item.target for item in spectra})
    groups: dict[str, list[Spectrum]] = defaultdict(list)
    for item in spectra:
        groups[names[item.target]].append(item)
    return groups


def _lines(axes: Axes, values: Mapping[str, list[list[float]]]) -> None:
    """Draw the median over modules of each target, with the range from least to most behind it."""
    colours = color_sequences["tab10" if len(values) <= 10 else "tab20"]  # noqa: PLR2004 - as their names say
    for at, (name, rows) in enumerate(values.items()):
        table = np.array(list(zip_longest(*rows, fillvalue=math.nan))).reshape(-1, len(rows))  # [k, module]
        table = table[~np.isnan(table).all(axis=1)]
        if not table.size:
            continue
        k, look = np.arange(1, len(table) + 1), {"color": colours[at % len(colours)]}
        label, marker = _plain(name) if at < _LINES else None, "." if len(table) == 1 else None
        axes.plot(k, np.nanmedian(table, axis=1), label=label, linewidth=1.4, marker=marker, **look)
        axes.fill_between(k, np.nanmin(table, axis=1), np.nanmax(table, axis=1), alpha=0.12, **look)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(fontsize=7, ncols=2)


def _draw_spectra(figure: FigureBase, spectra: Sequence[Spectrum]) -> None:
    left, right = figure.subplots(1, 2)
    groups = _by_target(spectra)
    shown = {
        name: [[value if 0 < value < math.inf else math.nan for value in item.singular_values] for item in items]
        for name, items in groups.items()
    }
    if not np.isnan([value for rows in shown.values() for row in rows for value in row]).all():
        left.set_yscale("log")
    _lines(left, shown)
    left.set_title("singular values of ΔW", loc="left")
    shares = {
        name: [[item.energy(k) for k in range(1, item.rank + 1)] for item in items] for name, items in groups.items()
    }
    _lines(right, shares)
    right.set_ylim(0, 1.02)
    right.set_title("share of ‖ΔW‖² in the first k", loc="left")
    for axes in (left, right):
        axes.set_xlabel("k")


def _draw_curves(figure: FigureBase, curves: Curves) -> None:
    panels = figure.subplots(math.ceil(len(curves) / _COLUMNS), min(len(curves), _COLUMNS), squeeze=False).reshape(-1)
    for axes, (name, points) in zip(panels, curves.items(), strict=False):
        axes.plot([step for step, _ in points], [value for _, value in points], linewidth=1.4, marker=".")
        axes.set_title(_plain(name), loc="left")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
