"""An inspection as tables on a terminal; without colours and cut lines where the output is a pipe or a file."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import new_table, print_all, ranges, spanning, sparkline
from lora_tool.core.display import counted, number, printable, shortened, size
from lora_tool.workflows.inspection.curves import Curves
from lora_tool.workflows.inspection.model import (
    AdapterInspection,
    CheckpointRow,
    Inspection,
    ModelInspection,
    ShardedInspection,
    Target,
    ValueSpread,
)
from lora_tool.workflows.inspection.targets import place

_SHOWN = 8
"""Rows of lists that may be long: shards, whole tensors, problems."""
_CURVES = 12
"""Rows of what a run logged."""
_MATRIX = 2


def show_inspection(inspection: Inspection, out: TextIO) -> None:
    """Write the inspection to `out`."""
    title = Text(inspection.kind, style="bold green").append("  ").append(printable(inspection.path), style="bold")
    print_all([title, _facts(inspection.facts()), *_tables(inspection), *_problems(inspection)], out)


def _facts(lines: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        if value:
            table.add_row(name, Text("\n".join(map(printable, value.splitlines()))))
    return table


def _tables(inspection: Inspection) -> Iterator[Table]:
    if isinstance(inspection, AdapterInspection) and inspection.targets:
        targets = sorted(inspection.targets, key=lambda target: place(target.name))
        columns = ("target", "×>", "layers", "rank>", "alpha>", "scaling>", "in → out", "dtype", "parameters>")
        yield new_table(columns, map(_target, targets))
        rows = list(_norms(targets))
        if rows:
            norms = ("target", *(("min>", "med>", "max>") * 3))
            spans = {"‖A‖": range(1, 4), "‖B‖": range(4, 7), "‖ΔW‖": range(7, 10)}
            yield new_table(spanning(norms, rows, spans), rows)
    if isinstance(inspection, ModelInspection) and len(inspection.files) > 1:
        more = len(inspection.files) - _SHOWN
        files = [(name, size(nbytes)) for name, nbytes in inspection.files[:_SHOWN]]
        yield new_table(("file", "size>"), [*files, *([(f"and {more} more", "")] if more > 0 else [])])
    if isinstance(inspection, ShardedInspection):
        tags = [(tag.tag, str(tag.files), size(tag.nbytes), "latest" * tag.latest) for tag in inspection.tags]
        yield new_table(("tag", "files>", "size>", ""), tags)
    if inspection.checkpoints:
        headers = ("checkpoint", "step>", "epoch>", "loss>", "kind", "size>", "")
        yield new_table(headers, map(_checkpoint, inspection.checkpoints))
    if inspection.curves:
        yield new_table(("logged", "×>", "first>", "last>", "min>", "max>", ""), _curves(inspection.curves))


def _curves(curves: Curves) -> Iterator[tuple[str, ...]]:
    for name, points in itertools.islice(curves.items(), _CURVES):
        values = [value for _, value in points]
        numbers = map(number, (values[0], values[-1], min(values), max(values)))
        yield shortened(name, 60), f"{len(values):,}", *numbers, sparkline(values) if len(values) > 1 else ""
    if len(curves) > _CURVES:
        yield f"and {len(curves) - _CURVES} more", *("",) * 6


def _target(target: Target) -> tuple[str | Text, ...]:
    return (
        target.name,
        str(len(target.modules)),
        ranges(target.layers),
        _rank(target),
        "?" if target.alpha is None else f"{target.alpha:.4g}",
        "?" if target.scaling is None else f"{target.scaling:.4g}",
        _sizes(target),
        target.dtype,
        f"{target.parameters:,}",
    )


def _rank(target: Target) -> str | Text:
    if target.rank is not None:
        return str(target.rank)
    known = target.a_shape and target.b_shape and target.parameters
    return Text("differs" if known else "?", style="red")


def _sizes(target: Target) -> str:
    a, b = target.a_shape, target.b_shape
    if a is None or b is None:
        return f"{'A' if a is None else 'B'} is missing"
    if not target.parameters:
        return "no values"
    if len(a) == _MATRIX and len(b) == _MATRIX:
        return f"{a[1]} → {b[0]}"
    return f"A {list(a)} B {list(b)}"


def _norms(targets: Sequence[Target]) -> Iterator[tuple[str, ...]]:
    names = [target.name for target in targets]
    for target in targets:
        if target.norms is not None:
            name = target.name if names.count(target.name) == 1 else f"{target.name} {ranges(target.layers)}"
            yield name, *_three(target.norms.a), *_three(target.norms.b), *_three(target.norms.delta)


def _three(spread: ValueSpread | None) -> tuple[str, str, str]:
    return ("?", "?", "?") if spread is None else (number(spread.least), number(spread.median), number(spread.most))


def _checkpoint(row: CheckpointRow) -> tuple[str | Text, ...]:
    training = row.training
    return (
        row.name,
        f"{training.step:,}" if training else "-",
        f"{training.epoch:.3g}" if training and training.epoch is not None else "-",
        number(training.loss if training else None),
        Text(row.kind, style="red" if row.kind == "unreadable" else ""),
        size(row.nbytes),
        Text(printable(row.note or ""), style="yellow"),
    )


def _problems(inspection: Inspection) -> Iterator[Group]:
    if inspection.problems:
        yield Group(
            Text(counted(len(inspection.problems), "problem"), style="bold red"),
            *(Text(f"  {printable(problem)}") for problem in inspection.problems[:_SHOWN]),
            Text(f"details: lora-tool validate {printable(shlex.quote(inspection.path))}"),
        )
