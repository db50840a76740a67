"""Pictures as one HTML file: no script, no network, every name from a file escaped; it follows the reader's light or
dark, fits a phone and can be printed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.figure import Figure

from lora_tool.core.display import four_digits, printable
from lora_tool.core.errors import MissingDependency
from lora_tool.workflows.inspection.curves import Curves
from lora_tool.workflows.inspection.spectra import Spectrum
from lora_tool_plot.grid import PanelGrid
from lora_tool_plot.panels import (
    curve_panels,
    curves_sentence,
    draw_curve,
    draw_spectra,
    labelled,
    spectra_panels,
    spectra_sentence,
    value_range,
)
from lora_tool_plot.sheet import Drawn
from lora_tool_plot.theme import by_name, depth_colours, heat_colour, short_number, variables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise MissingDependency("jinja2", extra="plot") from error

_TEMPLATE = "page.html.jinja"
_LABELS = 10
"""Numbers of layers that a phone has room for."""


def page(
    title: str,
    facts: Iterable[tuple[str, str]],
    grids: Sequence[PanelGrid],
    spectra: Sequence[Spectrum],
    curves: Curves,
    *,
    footer: str,
    drawn: Sequence[Drawn] = (),
) -> str:
    """Return the page as text: `facts` are names and values that are listed at its top, `drawn` what else is a
    picture.
    """
    environment = Environment(
        loader=PackageLoader("lora_tool_plot", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    layers = sorted({item.layer for item in spectra if item.layer is not None})
    panels = curve_panels(curves)
    return environment.get_template(_TEMPLATE).render(
        title=title,
        light=variables(dark=False),
        dark=variables(dark=True),
        facts=[(name, Markup("<br>").join(map(printable, value.splitlines()))) for name, value in facts if value],
        grids=[_lines(grid) for grid in grids],
        spectra=spectra,
        spectra_sentence=spectra_sentence(spectra),
        spectra_svgs=_spectra_svgs(spectra),
        layers=layers,
        depths=len(depth_colours()),
        curves_sentence=curves_sentence(curves),
        main_svgs=[_svg((4.2, 2.4), partial(draw_curve, panel=panel)) for panel in panels if panel.main],
        small_svgs=[_svg((2.1, 1.25), partial(draw_curve, panel=panel)) for panel in panels if not panel.main],
        number=four_digits,
        footer=footer,
        drawn=[(heading, sentence, _svg((4.8, 3.0), draw)) for heading, sentence, draw in drawn],
    )


def _lines(grid: PanelGrid) -> dict[str, object]:
    places = labelled(grid.columns, _LABELS)
    around = grid.centre is not None
    return {
        "grid": grid,
        "labels": [
            (grid.columns[at], end - at) for at, end in zip(places, [*places[1:], len(grid.columns)], strict=True)
        ],
        "marks": [short_number(value) for value in grid.marks],
        "heat": [heat_colour(step / 8, around=around) for step in range(9)],
        "lines": [
            (row, [(column, cell, _cell(grid, cell)) for column, cell in zip(grid.columns, cells, strict=True)])
            for row, cells in zip(grid.rows, grid.cells, strict=True)
        ],
    }


def _cell(grid: PanelGrid, cell: float | None) -> str:
    return "transparent" if cell is None else heat_colour(grid.position(cell), around=grid.centre is not None)


def _spectra_svgs(spectra: Sequence[Spectrum]) -> list[Markup]:
    panels = spectra_panels(spectra)
    ends = value_range(panels)
    return [_svg((2.7, 2.0), partial(draw_spectra, panel=panel, ends=ends)) for panel in panels]


def _svg(size: tuple[float, float], draw: Callable[[Axes], None]) -> Markup:
    """Return a picture of so many inches; on the page it is as wide as there is room."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    draw(axes)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    buffer = io.StringIO()
    # text as text: smaller, searchable, and the reader's own font
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lora-tool"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return Markup(by_name(text[text.index("<svg") :]))  # noqa: S704 - matplotlib escapes what it writes into its SVG
