"""A comparison as tables on a terminal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import new_table, print_all, ranges, spanning
from lora_tool.core.display import number
from lora_tool.core.keys import split_layer
from lora_tool.workflows.inspection.comparison import Comparison, Difference, ModuleChange
from lora_tool.workflows.inspection.targets import place, short_names


def show_comparison(comparison: Comparison, out: TextIO, *, every: bool = False) -> None:
    """Write the comparison to `out`: one line for the modules of a target, or with `every` for each."""
    parts: list[RenderableType] = [Text(comparison.summary, style="bold")]
    if comparison.fields:
        rows = [(name, *pair) for name, pair in comparison.fields.items()]
        parts.append(new_table(("config", "first", "second"), rows))
    shown = [item for item in comparison.differences if every or item.change is not ModuleChange.SAME]
    if shown:
        parts.append(_each(shown) if every else _by_target(shown))
    print_all(parts, out)


def _each(items: Iterable[Difference]) -> Table:
    rows = (
        (
            item.name,
            str(item.change),
            *map(number, (item.first, item.second, item.apart, item.relative)),
            _cosine(item.turned),
            item.note,
        )
        for item in items
    )
    return new_table(("module or tensor", "", "first>", "second>", "apart>", "relative>", "cosine>", ""), rows)


def _by_target(items: Iterable[Difference]) -> Table:
    groups: dict[tuple[str, ModuleChange, str], list[Difference]] = defaultdict(list)
    for item in items:
        groups[item.target, item.change, item.note].append(item)
    names = _short({item.target: item.kind for members in groups.values() for item in members})
    differ = len({change for _, change, _ in groups}) > 1  # else the line above says it of all
    rows = []
    for (target, change, note), members in sorted(groups.items(), key=lambda group: place(group[0][0])):
        layers = sorted({layer for item in members if (layer := split_layer(item.name)[0]) is not None})
        relatives = [item.relative for item in members if item.relative is not None]
        distances = [item.turned for item in members if item.turned is not None]
        rows.append(
            (
                names[target],
                str(len(members)),
                ranges(layers),
                str(change) if differ else "",
                _median([item.first for item in members if item.first is not None]),
                _median([item.second for item in members if item.second is not None]),
                _median(relatives),
                number(max(relatives, default=None)),
                _cosine(max(distances, default=None)),
                _cosine(statistics.median(distances) if distances else None),
                note,
            )
        )
    columns = ("target", "×>", "layers", "", "1st>", "2nd>", "med>", "max>", "min>", "med>", "")
    spans = {"norms": range(4, 6), "relative": range(6, 8), "cosine": range(8, 10)}
    return new_table(spanning(columns, rows, spans), rows)


_NEAR = 1e-3
"""1 - cosine below which three digits of a cosine are 1.00."""
_NOISE = 1e-14
"""What rounding in float64 leaves of 1 - cosine where the directions are the same."""


def _cosine(away: float | None) -> str:
    """Return the cosine 1 - `away` as text: near 1 as its distance from 1, where three digits would all read 1.00."""
    if away is None or not away < _NEAR:
        return number(None if away is None else 1.0 - away)
    return f"1 - {away:.1e}" if away > _NOISE else "1"


def _short(kinds: Mapping[str, str]) -> Mapping[str, str]:
    """Return short names of targets; a tensor keeps the module that its parameter belongs to."""
    split = {target: target.rpartition(".") if kind == "tensor" else (target, "", "") for target, kind in kinds.items()}
    modules = short_names({module for module, _, _ in split.values()})
    return {target: modules[module] + dot + leaf for target, (module, dot, leaf) in split.items()}


def _median(values: Sequence[float]) -> str:
    return number(statistics.median(values) if values else None)
