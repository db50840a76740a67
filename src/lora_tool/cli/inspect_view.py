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
        targets = sorted(inspection.targets, key=_conventional)
        columns = ("target", "×>", "layers", "rank>", "scaling>", "in → out", "dtype", "parameters>")
        yield new_table(columns, map(_target, targets))
        if any(target.norms for target in targets):
            norms = (f"{norm}\n{what}>" for norm in ("‖A‖", "‖B‖", "‖ΔW‖") for what in ("min", "med", "max"))
            yield new_table(("\ntarget", *norms), _norms(targets))
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


def _conventional(target: Target) -> int:
    last = target.name.partition(" ")[0].rpartition(".")[2]
    return _ORDER.index(last) if last in _ORDER else len(_ORDER)


def _target(target: Target) -> tuple[str | Text, ...]:
    return (
        target.name,
        str(len(target.modules)),
        ranges(target.layers),
        _rank(target),
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


def _three(spread: Spread | None) -> tuple[str, str, str]:
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
            Text(f"lora-tool validate {printable(inspection.path)} says more"),
        )
