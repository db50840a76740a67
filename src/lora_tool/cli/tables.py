"""Tables and numbers on a terminal; without colours and cut lines where the output is a pipe or a file."""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lora_tool.cli.terminal import wants_colour
from lora_tool.core.display import printable

_WIDE = 240
"""Columns where nobody watches: enough that no name is cut."""
_WIDEST = 4_000
"""Columns that a table may take: a name may be a megabyte."""
_GAP = 2


def print_all(parts: Iterable[RenderableType], out: TextIO) -> None:
    """Write the parts with an empty line between them; nothing is cut, and no name or number is broken."""
    buffer = io.StringIO()
    for at, part in enumerate(parts):
        if at:
            buffer.write("\n")
        Console(
            file=buffer,
            # a table that is wider for all its folding is left to the terminal, which breaks its lines, not its cells
            width=max(_width(out), _least_width(part) if isinstance(part, Table) else 0),
            force_terminal=out.isatty(),
            color_system="auto" if wants_colour() else None,
            highlight=False,
        ).print(part)
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # Δ and ‖ on a terminal that has no such letters
    out.writelines(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def show_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Write one table to stdout."""
    print_all([new_table(columns, [tuple(row) for row in rows])], sys.stdout)


def _width(out: TextIO) -> int:
    return Console(file=out).width if out.isatty() else _WIDE


def _least_width(table: Table) -> int:
    """Return the columns of a terminal that the table needs when the texts in it are folded between words."""
    total = 0
    for column in table.columns:
        cells = [str(cell) for cell in (column.header, *column.cells)]
        parts = [part for cell in cells for part in (cell.splitlines() if column.no_wrap else cell.split())]
        total += max(map(cell_len, parts), default=0) + _GAP
    return min(total, _WIDEST)


def fits_folded(table: Table, out: TextIO) -> bool:
    """Return whether the table is no wider than the terminal when the texts in it are folded between words."""
    return _least_width(table) <= _width(out)


def fits(table: Table, out: TextIO) -> bool:
    """Return whether every row of the table has one line."""
    console = Console(file=out, width=_WIDEST)
    return Measurement.get(console, console.options, table).maximum <= _width(out)


def new_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a borderless table of the columns that any row has something in; one whose name ends in ``>`` is aligned
    to the right. A text in a cell is shown as it is, made harmless.

    Only texts are folded, between their words: not the names in the first column, nor numbers, which are to the right.
    """
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold cyan", pad_edge=False)
    listed = list(rows)
    kept = [at for at, _ in enumerate(columns) if any(str(row[at]) for row in listed)]
    for place, at in enumerate(kept):
        right = columns[at].endswith(">")
        justify: Literal["left", "right"] = "right" if right else "left"
        header = columns[at].removesuffix(">")
        table.add_column(header, justify=justify, overflow="fold", no_wrap=right or not place)
    for row in listed:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for at in kept for cell in [row[at]]))
    return table


def spanning(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], spans: Mapping[str, range]) -> list[str]:
    """Return the columns with a first line over them: the name of each span in its middle, over two columns in the
    first, with rules beside it. Columns under no span get an empty line.
    """
    over = dict.fromkeys(range(len(columns)), "")
    for name, places in spans.items():
        for at in places:
            title = columns[at].removesuffix(">")
            over[at] = "─" * max(map(cell_len, (title, *(str(row[at]) for row in rows))))
        over[places[(len(places) - 1) // 2]] = name
    return [f"{over[at]}\n{column}" for at, column in enumerate(columns)]


SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_WIDE = 16


def sparkline(values: Sequence[float]) -> str:
    """Return finite values as blocks from the least to the most, each the mean of its share of them."""
    if not values:
        return ""
    count = min(_SPARKS_WIDE, len(values))
    edges = [len(values) * at // count for at in range(count + 1)]
    means = [math.fsum(values[begin:end]) / (end - begin) for begin, end in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    steps = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - least) / (most - least) * steps) if most > least else 0] for mean in means)
