"""An adapter's pictures as one HTML file: no script, no network, every name from a file escaped."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from matplotlib import rc_context
from matplotlib.figure import Figure

from lora_tool.display import four_digits, printable
from lora_tool.errors import MissingDependency
from lora_tool.inspection.curves import Curves
from lora_tool.inspection.spectra import Spectrum
from lora_tool.pictures.figures import colour, curves_figure, spectra_figure
from lora_tool.pictures.grid import Grid

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise MissingDependency("jinja2", extra="plot") from error

_TEMPLATE = "page.html.jinja"


def page(
    title: str,
    facts: Iterable[tuple[str, str]],
    grids: Sequence[Grid],
    spectra: Sequence[Spectrum],
    curves: Curves,
    *,
    dora: bool = False,
    drawn: Sequence[tuple[str, Figure]] = (),
) -> str:
    """Return the page as text: `facts` are names and values that are listed at its top, `drawn` figures by their headings."""
    environment = Environment(
        loader=PackageLoader("lora_tool.pictures", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        title=title,
        facts=[(name, Markup("<br>").join(map(printable, value.splitlines()))) for name, value in facts if value],
        grids=[_lines(grid) for grid in grids],
        spectra=spectra,
        spectra_svg=_svg(spectra_figure(spectra)) if spectra else "",
        curves_svg=_svg(curves_figure(curves)) if curves else "",
        scale=[colour(step / 8, 1) for step in range(9)],
        colour=colour,
        number=four_digits,
        version=version("lora-tool"),
        dora=dora,
        drawn=[(heading, _svg(figure)) for heading, figure in drawn],
    )


def _lines(grid: Grid) -> dict[str, object]:
    lines = [
        (row, list(zip(grid.columns, cells, strict=True))) for row, cells in zip(grid.rows, grid.cells, strict=True)
    ]
    return {"title": grid.title, "columns": grid.columns, "lines": lines, "most": grid.most}


def _svg(figure: Figure) -> Markup:
    buffer = io.StringIO()
    # text as text: smaller, searchable, and the reader's own font
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lora-tool"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return Markup(text[text.index("<svg") :])  # noqa: S704 - matplotlib escapes what it writes into its SVG
