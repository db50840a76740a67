"""An inventory, and what pruning would do with it, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import fits, new_table, print_all
from lora_tool.core.display import counted, number, printable, size
from lora_tool.workflows.inventory import FileRole, Inventory, Listed, PruneChoice

_COLOURS = {"good": "green", "warned": "yellow", "incomplete": "yellow", "broken": "red", "not judged": "yellow"}


def show_inventory(runs: Sequence[Inventory], root: Path, out: TextIO) -> None:
    """Write one line per checkpoint, and the totals."""
    listed = [(run, item) for run in runs for item in run.checkpoints]
    if not listed:
        print_all([f"no checkpoints under {printable(str(root))}"], out)
        return
    table = _table(listed, root, by_content=True)
    if not fits(table, out):
        table = _table(listed, root, by_content=False)
    totals = {content: sum(item.sizes[content] for _, item in listed) for content in FileRole}
    kinds = ", ".join(f"{content} {size(total)}" for content, total in totals.items() if total)
    print_all([table, f"{counted(len(listed), 'checkpoint')}, {size(sum(totals.values()))}: {kinds}"], out)


def _table(listed: Sequence[tuple[Inventory, Listed]], root: Path, *, by_content: bool) -> Table:
    contents = [f"{content}>" for content in FileRole] if by_content else ["size>"]
    columns = ["checkpoint", "kind", "step>", "loss>", "metric>", *contents, "verdict"]
    rows: list[tuple[str | Text, ...]] = []
    for run, item in listed:
        star = " *" if item.best and len(run.checkpoints) > 1 else ""
        metric = f" {run.metric}" if run.metric and item.row.metric is not None else ""
        sizes = [item.sizes[content] for content in FileRole] if by_content else [item.row.nbytes]
        rows.append(
            (
                _name(item, root) + star,
                item.kind,
                "" if item.row.step is None else str(item.row.step),
                number(item.row.loss, none=""),
                number(item.row.metric, none="") + metric,
                *(size(nbytes) if nbytes else "" for nbytes in sizes),
                Text(_verdict(item), style=_COLOURS[item.row.verdict]),
            )
        )
    return new_table(columns, rows)


def show_choices(choices: Sequence[PruneChoice], root: Path, out: TextIO, *, done: bool) -> None:
    """Write what is kept and what goes, with the reason, and how much that frees."""
    columns = ["checkpoint", "step>", "metric>", "size>", "verdict", "", "because"]
    rows = [
        (
            _name(choice.checkpoint, root),
            "" if choice.checkpoint.row.step is None else str(choice.checkpoint.row.step),
            number(choice.checkpoint.row.metric, none=""),
            size(choice.checkpoint.row.nbytes),
            _verdict(choice.checkpoint),
            Text("goes", style="red") if choice.goes else Text("stays", style="green"),
            choice.because,
        )
        for choice in choices
    ]
    table = new_table(columns, rows)
    going = [choice.checkpoint for choice in choices if choice.goes]
    freed = size(sum(item.row.nbytes for item in going))
    if not choices:
        print_all(
            [f"no checkpoints of a run (checkpoint-N, global_stepN, iter_N, step-N) under {printable(str(root))}"], out
        )
    elif not going:
        print_all([table, "nothing to remove"], out)
    elif done:
        print_all([table, f"removed {counted(len(going), 'checkpoint')}, {freed}"], out)
    else:
        print_all(
            [table, f"would remove {counted(len(going), 'checkpoint')} and free {freed}; --apply removes them"], out
        )


def _name(item: Listed, root: Path) -> str:
    return str(item.root.relative_to(root)) if item.root.is_relative_to(root) else str(item.root)


def _verdict(item: Listed) -> str:
    return item.row.verdict + (f": {', '.join(item.row.codes)}" if item.row.codes else "")
