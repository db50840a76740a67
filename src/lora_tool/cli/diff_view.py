"""A comparison as tables on a terminal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table

from lora_tool.cli.tables import new_table, print_all, ranges
from lora_tool.display import number
from lora_tool.inspection.comparison import Comparison, Difference, ModuleChange
from lora_tool.inspection.naming import short_names
from lora_tool.keys import split_layer


def show_comparison(comparison: Comparison, out: TextIO, *, every: bool = False) -> None:
    """Write the comparison to `out`: one line for the modules of a target, or with `every` for each."""
    parts: list[RenderableType] = [_summary(comparison)]
    if comparison.fields:
        rows = [(name, *pair) for name, pair in comparison.fields.items()]
        parts.append(new_table(("config", "first", "second"), rows))
    shown = [item for item in comparison.differences if every or item.change is not ModuleChange.SAME]
    if shown:
        parts.append(_each(shown) if every else _by_target(shown))
    print_all(parts, out)


def _summary(comparison: Comparison) -> str:
    if comparison.same:
        return f"the same: {len(comparison.differences)} modules and tensors"
    counts: dict[ModuleChange, int] = defaultdict(int)
    for item in comparison.differences:
        counts[item.change] += 1
    return ", ".join(f"{counts[change]} {change}" for change in ModuleChange if counts[change])


def _each(items: Iterable[Difference]) -> Table:
    rows = (
        (
            item.name,
            str(item.change),
            *map(number, (item.first, item.second, item.apart, item.relative, item.cosine)),
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
    columns = [
        "\ntarget", "\n×>", "\nlayers", "\n", "‖1st‖\nmed>", "‖2nd‖\nmed>", "relative\nmed>", "relative\nmax>",
        "cosine\nmin>", "cosine\nmed>", "\n",
    ]  # fmt: skip
    rows = []
    for (target, change, note), members in groups.items():
        layers = sorted({layer for item in members if (layer := split_layer(item.name)[0]) is not None})
        relatives = [item.relative for item in members if item.relative is not None]
        cosines = [item.cosine for item in members if item.cosine is not None]
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
                number(min(cosines, default=None)),
                _median(cosines),
                note,
            )
        )
    return new_table(columns, rows)


def _short(kinds: Mapping[str, str]) -> Mapping[str, str]:
    """Return short names of targets; a tensor keeps the module that its parameter belongs to."""
    split = {target: target.rpartition(".") if kind == "tensor" else (target, "", "") for target, kind in kinds.items()}
    modules = short_names({module for module, _, _ in split.values()})
    return {target: modules[module] + dot + leaf for target, (module, dot, leaf) in split.items()}


def _median(values: Sequence[float]) -> str:
    return number(statistics.median(values) if values else None)
