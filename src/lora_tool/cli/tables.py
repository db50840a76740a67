"""Tables and numbers on a terminal; without colours and cut lines where the output is a pipe or a file."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table

from lora_tool.cli.options import wants_colour

_WIDE = 240
"""Columns where nobody watches: enough that no name is cut."""


def print_all(parts: Iterable[RenderableType], out: TextIO) -> None:
    """Write the parts with an empty line between them; nothing is cut where nobody watches."""
    watched = out.isatty()
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=Console(file=out).width if watched else _WIDE,
        force_terminal=watched,
        color_system="auto" if wants_colour() else None,
        highlight=False,
    )
    for at, part in enumerate(parts):
        if at:
            console.print()
        console.print(part)
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # Δ and ‖ on a terminal that has no such letters
    out.writelines(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def new_table(*columns: str) -> Table:
    """Return a borderless table; a column whose name ends in ``>`` is aligned to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan", pad_edge=False)
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.removesuffix(">"), justify="right" if right else "left", overflow="fold")
    return table


def number(value: float) -> str:
    """Return three significant digits: ``0.490``, ``12.3``, ``1.20e-05``."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf"
    return "0" if value == 0 else f"{value:#.3g}".removesuffix(".")


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with neighbours joined: ``0-3, 5, 8-11``; what is too irregular to read is cut."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] + 1 == n:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    listed = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(listed[:4] + (["…"] if len(listed) > 4 else [])) or "-"  # noqa: PLR2004 - fits its column
