"""An inspection as tables on a terminal; without colours and cut lines where the output is a pipe or a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import new_table, print_all, ranges
from lora_tool.display import counted, number, printable, size
from lora_tool.inspection.model import (
    AdapterInspection,
    CheckpointRow,
    Inspection,
    ModelInspection,
    ShardedInspection,
    Spread,
    Target,
)

_SHOWN = 8
"""Rows of lists that may be long: shards, whole tensors, problems."""
_ORDER = ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "o_proj", "gate_proj", "up_proj", "down_proj")
_MATRIX = 2


def show(inspection: Inspection, out: TextIO) -> None:
    """Write the inspection to `out`."""
    title = Text(inspection.kind, style="bold green").append("  ").append(printable(inspection.path), style="bold")
    print_all([title, _facts(inspection.facts()), *_tables(inspection), *_problems(inspection)], out)


def _facts(lines: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        if value:
            table.add_row(name, Text(printable(value)))
    return table


def _tables(inspection: Inspection) -> Iterator[Table]:
    if isinstance(inspection, AdapterInspection) and inspection.targets:
        targets = sorted(inspection.targets, key=_conventional)
        yield _target_table(targets)
        if any(target.norms for target in targets):
            yield _norm_table(targets)
    if isinstance(inspection, ModelInspection) and len(inspection.files) > 1:
        table = new_table("file", "size>")
        for name, nbytes in inspection.files[:_SHOWN]:
            table.add_row(Text(printable(name)), size(nbytes))
        if len(inspection.files) > _SHOWN:
            table.add_row(f"and {len(inspection.files) - _SHOWN} more", "")
        yield table
    if isinstance(inspection, ShardedInspection):
        table = new_table("tag", "files>", "size>", "")
        for tag in inspection.tags:
            note = "latest" if tag.latest else ""
            table.add_row(Text(printable(tag.tag)), str(tag.files), size(tag.nbytes), note)
        yield table
    if inspection.checkpoints:
        yield _checkpoint_table(inspection.checkpoints)


def _conventional(target: Target) -> int:
    last = target.name.partition(" ")[0].rpartition(".")[2]
    return _ORDER.index(last) if last in _ORDER else len(_ORDER)


def _target_table(targets: Sequence[Target]) -> Table:
    table = new_table("target", "×>", "layers", "rank>", "scaling>", "in → out", "dtype", "parameters>")
    for target in targets:
        table.add_row(
            Text(printable(target.name)),
            str(len(target.modules)),
            ranges(target.layers),
            _rank(target),
            "?" if target.scaling is None else f"{target.scaling:.4g}",
            _sizes(target),
            target.dtype,
            f"{target.parameters:,}",
        )
    return table


def _rank(target: Target) -> Text:
    if target.rank is not None:
        return Text(str(target.rank))
    known = target.a_shape and target.b_shape and target.parameters
    return Text("differs" if known else "?", style="red")


def _sizes(target: Target) -> str:
    a, b = target.a_shape, target.b_shape
    if a is not None and b is not None and not target.parameters:
        return "no values"
    if a is None or b is None:
        return f"{'A' if a is None else 'B'} is missing"
    if len(a) == _MATRIX and len(b) == _MATRIX:
        return f"{a[1]} → {b[0]}"
    return f"A {list(a)} B {list(b)}"


def _norm_table(targets: Sequence[Target]) -> Table:
    columns = (f"{norm}\n{what}>" for norm in ("‖A‖", "‖B‖", "‖ΔW‖") for what in ("min", "med", "max"))
    table = new_table("\ntarget", *columns)
    names = [target.name for target in targets]
    for target in targets:
        if target.norms is not None:
            name = target.name if names.count(target.name) == 1 else f"{target.name} {ranges(target.layers)}"
            numbers = (*_three(target.norms.a), *_three(target.norms.b), *_three(target.norms.delta))
            table.add_row(Text(printable(name)), *numbers)
    return table


def _three(spread: Spread | None) -> tuple[str, str, str]:
    return ("?", "?", "?") if spread is None else (number(spread.least), number(spread.median), number(spread.most))


def _checkpoint_table(rows: Sequence[CheckpointRow]) -> Table:
    table = new_table("checkpoint", "step>", "epoch>", "loss>", "kind", "size>", "")
    for row in rows:
        training = row.training
        table.add_row(
            Text(printable(row.name)),
            f"{training.step:,}" if training else "-",
            f"{training.epoch:.3g}" if training and training.epoch is not None else "-",
            number(training.loss) if training and training.loss is not None else "-",
            Text(row.kind, style="red" if row.kind == "unreadable" else ""),
            size(row.nbytes),
            Text(printable(row.note or ""), style="yellow"),
        )
    return table


def _problems(inspection: Inspection) -> Iterator[Group]:
    if inspection.problems:
        yield Group(
            Text(counted(len(inspection.problems), "problem"), style="bold red"),
            *(Text(f"  {printable(problem)}") for problem in inspection.problems[:_SHOWN]),
            Text(f"lora-tool validate {printable(inspection.path)} says more"),
        )
