"""One sheet with all pictures below one another, for PNG, SVG and PDF: laid out in inches from its top."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from matplotlib.figure import Figure
from msgspec import Struct

from lora_tool.workflows.inspection.curves import Curves
from lora_tool.workflows.inspection.spectra import Spectrum
from lora_tool_plot.grid import PanelGrid
from lora_tool_plot.panels import (
    ROW_LETTERS,
    CurvePanel,
    SpectraPanel,
    curve_panels,
    curves_sentence,
    draw_curve,
    draw_heat_map,
    draw_spectra,
    spectra_panels,
    spectra_sentence,
    value_range,
)
from lora_tool_plot.theme import DEPTHS, SOFT, cut, depth_colours, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 11.0
_LEFT, _RIGHT = 0.5, 0.5
_TOP, _BOTTOM = 0.35, 0.4
_LETTERS = 172
"""Letters of a sentence's line."""
_TITLE_LETTERS = 1200
"""Letters of a title at one point."""
_LINE = 0.18
_BETWEEN = 0.3
_ROW = 0.26
_MOST_CELL = 0.9
"""Inches of a cell at most: four layers do not need the width of eighty."""
_SPECTRA_ACROSS, _SPECTRA_HIGH = 4, 1.7
_MAIN_ACROSS, _MAIN_HIGH = 2, 2.2
_SMALL_ACROSS, _SMALL_HIGH = (4, 5), 1.05
_ALONE_HIGH = 3.4
_TITLE, _TICKS, _GAP = 0.3, 0.32, 0.58
"""Over a panel, under it, and between two side by side."""


class _Block(Struct, frozen=True):
    height: float
    draw: Callable[[Figure, float], None]
    """Draws it from so many inches below the top."""


Drawn: TypeAlias = tuple[str, str, Callable[["Axes"], None]]
"""A heading, a sentence, and what draws the picture under them."""


def sheet(
    title: str,
    subtitle: str,
    grids: Sequence[PanelGrid],
    spectra: Sequence[Spectrum],
    curves: Curves,
    *,
    footer: str,
    drawn: Sequence[Drawn] = (),
) -> Figure:
    """Return the sheet; a flat heat map is its sentence alone."""
    blocks = [_heading(title, subtitle, size=15), *_blocks(grids, spectra, curves, drawn)]
    height = _TOP + sum(block.height for block in blocks) + _BOTTOM
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    top = _TOP
    for block in blocks:
        block.draw(figure, top)
        top += block.height
    _write(figure, _LEFT, height - _BOTTOM + 0.2, footer, color=SOFT, fontsize=7.5)
    return figure


def _blocks(
    grids: Sequence[PanelGrid], spectra: Sequence[Spectrum], curves: Curves, drawn: Sequence[Drawn]
) -> Iterator[_Block]:
    for grid in grids:
        yield _heading(grid.title, grid.said)
        yield _heat_map(grid) if not grid.flat else _space(0.0)
        yield _space(_BETWEEN)
    panels = spectra_panels(spectra)
    if panels:
        yield _heading("Singular values", spectra_sentence(spectra))
        yield _spectra(panels, sorted({item.layer for item in spectra if item.layer is not None}))
        yield _space(_BETWEEN)
    for heading, sentence, draw in drawn:
        yield _heading(heading, sentence)
        yield _alone(draw)
    if curves:
        yield _heading("Training", curves_sentence(curves))
        drawings = curve_panels(curves)
        main = [panel for panel in drawings if panel.main]
        small = [panel for panel in drawings if not panel.main]
        yield _curves(main, _MAIN_ACROSS if len(main) > 1 else 1, _MAIN_HIGH)
        yield _curves(small, min(_SMALL_ACROSS, key=lambda across: -len(small) % across), _SMALL_HIGH)


def _space(height: float) -> _Block:
    return _Block(height, lambda _figure, _top: None)


def _write(figure: Figure, left: float, top: float, text: str, **look: Any) -> None:
    """Write a text whose upper left corner is so many inches from those of the figure."""
    height = figure.get_figheight()
    figure.text(left / WIDTH, 1 - top / height, plain(text), va="top", ha="left", **look)


def _heading(title: str, sentence: str, *, size: float = 11) -> _Block:
    lines = textwrap.wrap(sentence, _LETTERS)
    first = size / 72 * 1.45

    def draw(figure: Figure, top: float) -> None:
        _write(figure, _LEFT, top, cut(title, int(_TITLE_LETTERS / size)), fontsize=size, weight="bold")
        for at, line in enumerate(lines):
            _write(figure, _LEFT, top + first + at * _LINE, line, color=SOFT, fontsize=8.5)

    return _Block(first + len(lines) * _LINE + (0.14 if size < 12 else 0.25), draw)  # noqa: PLR2004 - of the title


def _axes(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Return axes of that size in inches, whose upper left corner is there."""
    tall = figure.get_figheight()
    return figure.add_axes((left / WIDTH, 1 - (top + height) / tall, width / WIDTH, height / tall))


def _heat_map(grid: PanelGrid) -> _Block:
    names = min(max(map(len, grid.rows), default=0), ROW_LETTERS) * 0.078 + 0.12
    room = WIDTH - _LEFT - _RIGHT - names - 0.75
    width, height = min(room, _MOST_CELL * len(grid.columns)), _ROW * len(grid.rows)

    def draw(figure: Figure, top: float) -> None:
        left = _LEFT + names
        scale = _axes(figure, left + width + 0.15, top, 0.11, max(height, 0.6))
        draw_heat_map(_axes(figure, left, top, width, height), scale, grid)

    return _Block(max(height, 0.6) + 0.42, draw)


def _spectra(panels: Sequence[SpectraPanel], layers: Sequence[int]) -> _Block:
    ends = value_range(panels)
    rows, strip = math.ceil(len(panels) / _SPECTRA_ACROSS), 0.3 if len(layers) > 1 else 0.0

    def draw(figure: Figure, top: float) -> None:
        if strip:
            _depth_scale(figure, top, layers)
        tiles = _tiles(figure, top + strip, len(panels), _SPECTRA_ACROSS, _SPECTRA_HIGH)
        for axes, panel in zip(tiles, panels, strict=True):
            draw_spectra(axes, panel, ends)
            axes.set_xlabel("k", labelpad=1)

    return _Block(strip + rows * _tall(_SPECTRA_HIGH), draw)


def _depth_scale(figure: Figure, top: float, layers: Sequence[int]) -> None:
    first, wide = f"layer {layers[0]}", 1.8
    left = _LEFT + 0.075 * len(first) + 0.08
    _write(figure, _LEFT, top, first, fontsize=8, color=SOFT)
    _write(figure, left + wide + 0.1, top, f"{layers[-1]}", fontsize=8, color=SOFT)
    axes = _axes(figure, left, top + 0.015, wide, 0.1)
    for at, colour in enumerate(depth_colours()):
        axes.axvspan(at / DEPTHS, (at + 1) / DEPTHS, color=colour, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_axis_off()


def _curves(panels: Sequence[CurvePanel], across: int, high: float) -> _Block:
    def draw(figure: Figure, top: float) -> None:
        for axes, panel in zip(_tiles(figure, top, len(panels), across, high), panels, strict=True):
            draw_curve(axes, panel)
            if panel.main:
                axes.set_xlabel("step", labelpad=1)

    return _Block(math.ceil(len(panels) / across) * _tall(high), draw)


def _alone(draw: Callable[[Axes], None]) -> _Block:
    def draw_block(figure: Figure, top: float) -> None:
        draw(_axes(figure, _LEFT + 0.5, top, WIDTH - _LEFT - _RIGHT - 0.5, _ALONE_HIGH))

    return _Block(_ALONE_HIGH + 0.5, draw_block)


def _tall(high: float) -> float:
    return _TITLE + high + _TICKS + 0.12


def _tiles(figure: Figure, top: float, count: int, across: int, high: float) -> Iterator[Axes]:
    """Yield axes side by side, so many in a row."""
    ticks = 0.32
    width = (WIDTH - _LEFT - _RIGHT - ticks - (across - 1) * _GAP) / across
    for at in range(count):
        row, column = divmod(at, across)
        left = _LEFT + ticks + column * (width + _GAP)
        yield _axes(figure, left, top + _TITLE + row * _tall(high), width, high)
