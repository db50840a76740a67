"""A comparison as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import new_table, print_all, spanning
from lora_tool.core.display import number
from lora_tool.workflows.inspection.comparison import Comparison, Difference, ModuleChange, cosine


def show_comparison(comparison: Comparison, out: TextIO, *, every: bool = False) -> None:
    """Write the comparison to `out`: one line for the modules of a target, or with `every` for each."""
    parts: list[RenderableType] = [Text(comparison.summary, style="bold")]
    if comparison.fields:
        rows = [(name, *pair) for name, pair in comparison.fields.items()]
        parts.append(new_table(("config", "first", "second"), rows))
    shown = [item for item in comparison.differences if every or item.change is not ModuleChange.SAME]
    if shown:
        parts.append(_each(shown) if every else _by_target(comparison))
    print_all(parts, out)


def _each(items: Iterable[Difference]) -> Table:
    rows = (
        (
            item.name,
            str(item.change),
            *map(number, (item.first, item.second, item.apart, item.relative)),
            cosine(item.turned),
            item.note,
        )
        for item in items
    )
    return new_table(("module or tensor", "", "first>", "second>", "apart>", "relative>", "cosine>", ""), rows)


def _by_target(comparison: Comparison) -> Table:
    rows = comparison.by_target.rows
    columns = ("target", "×>", "layers", "", "1st>", "2nd>", "med>", "max>", "min>", "med>", "")
    spans = {"norms": range(4, 6), "relative": range(6, 8), "cosine": range(8, 10)}
    return new_table(spanning(columns, rows, spans), rows)
