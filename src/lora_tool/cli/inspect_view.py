"""An inspection as tables on a terminal; without colours and cut lines where the output is a pipe or a file."""

from __future__ import annotations

import itertools
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TextIO

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import fits_folded, new_table, print_all, spanning, sparkline
from lora_tool.core.display import as_cell, counted, number, printable, ranges, shortened, size
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
from lora_tool.workflows.inspection.targets import place, short_names, spread

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


# Several inspections side by side on a terminal: what they have in common once, then what differs.


Column = Mapping[str, str]
"""What stands in each row of one folder."""


def show_several(inspections: Sequence[Inspection], out: TextIO) -> None:
    """Write the inspections to `out`, a column for each; where they do not fit side by side, a few at a time."""
    titles = [printable(title) for title in _titles([inspection.path for inspection in inspections])]
    columns = [dict(_rows(inspection)) for inspection in inspections]
    names = list(dict.fromkeys(itertools.chain.from_iterable(columns)))
    common = [name for name in names if len({column.get(name, "") for column in columns}) == 1]
    parts: list[RenderableType] = [Text(counted(len(inspections), "folder"), style="bold")]
    if common:
        table = new_table(("the same in all", ""), [(name, shortened(columns[0][name])) for name in common])
        table.columns[1].no_wrap = False
        parts.append(table)
    different = [name for name in names if name not in common]
    parts += _side_by_side("different", titles, different, columns, out)
    norms = [_norm_rows(inspection) for inspection in inspections]
    moved = sorted(dict.fromkeys(itertools.chain.from_iterable(norms)), key=place)
    parts += _side_by_side("median ‖ΔW‖", [f"{title}>" for title in titles], moved, norms, out)
    print_all(parts, out)


def _side_by_side(
    what: str, titles: Sequence[str], rows: Sequence[str], columns: Sequence[Column], out: TextIO
) -> Iterator[Table]:

    def table(begin: int, end: int) -> Table:
        shown = ((row, *(as_cell(each.get(row, "-")) for each in columns[begin:end])) for row in rows)
        return new_table((what, *titles[begin:end]), shown)

    begin = 0
    while begin < len(columns) and rows:
        end = len(columns)
        while end > begin + 1 and not fits_folded(table(begin, end), out):
            end -= 1
        yield table(begin, end)
        begin = end


def _rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    """Yield names and values of the facts, each in one line, and for an adapter what its table would have."""
    yield "kind", inspection.kind
    for name, value in inspection.facts():
        if name == "tokenizer":  # the names are the same everywhere
            yield name, counted(len(inspection.tokenizer_files), "file")
        elif value:
            yield name, ", ".join(value.splitlines())
    if isinstance(inspection, AdapterInspection):
        targets = sorted(inspection.targets, key=lambda target: place(target.name))
        yield "targets", ", ".join(dict.fromkeys(target.name for target in targets))
        yield "modules", str(len(inspection.modules))
        yield "rank", _values(target.rank for target in targets)
        yield "alpha", _values(target.alpha for target in targets)
        yield "scaling", _values(target.scaling for target in targets)


def _values(values: Iterable[float | None]) -> str:
    found = set(values)
    listed = [f"{value:.4g}" for value in sorted((value for value in found if value is not None), reverse=True)]
    return ", ".join([*listed, *(["?"] if None in found else [])])


def _norm_rows(inspection: Inspection) -> dict[str, str]:
    found: dict[str, list[float]] = defaultdict(list)
    for module in inspection.modules if isinstance(inspection, AdapterInspection) else ():
        if module.norm_delta is not None:
            found[module.target].append(module.norm_delta)
    return {target: number(spread(values).median) for target, values in found.items()}


def _titles(paths: Sequence[str]) -> list[str]:
    """Return the shortest end of each path that no other has; equal ones are numbered."""
    dotted = {path: ".".join(part.replace(".", "\0") for part in PurePath(path).parts) for path in paths}
    short = short_names(dotted.values())
    ends = [short[dotted[path]].replace(".", "/").replace("\0", ".") for path in paths]
    return [end if ends.count(end) == 1 else f"{end} ({ends[: at + 1].count(end)})" for at, end in enumerate(ends)]
