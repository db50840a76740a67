"""An inventory, and what pruning would do with it, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.table import Table
from rich.text import Text

from lora_tool.cli.tables import fits, fits_folded, new_table, print_all
from lora_tool.core.display import counted, number, printable, size
from lora_tool.workflows.ls import Listing
from lora_tool.workflows.prune import PruneChoice

_COLOURS = {"good": "green", "warned": "yellow", "incomplete": "yellow", "broken": "red", "not judged": "yellow"}


def show_inventory(listing: Listing, out: TextIO) -> None:
    """Write one line per checkpoint, and the totals."""
    parts: list[str | Table] = [listing.summary]
    if listing.checkpoints:
        table = _table(listing, by_content=True)
        if not fits(table, out):
            table = _table(listing, by_content=False)
        parts.insert(0, table if fits_folded(table, out) else _table(listing, by_content=False, kinds=False))
    print_all(parts, out)


def _table(listing: Listing, *, by_content: bool, kinds: bool = True) -> Table:
    table = listing.table(by_content=by_content)
    rows: list[tuple[str | Text, ...]] = [
        (row[0], row[1] if kinds else "", *row[2:-1], Text(row[-1], style=_COLOURS[item.row.verdict]))
        for row, item in zip(table.rows, listing.checkpoints, strict=True)
    ]
    return new_table(table.columns, rows)


def show_choices(choices: Sequence[PruneChoice], root: Path, out: TextIO, *, done: bool) -> None:
    """Write what is kept and what goes, with the reason, and how much that frees."""
    columns = ["checkpoint", "step>", "metric>", "size>", "verdict", "", "because"]
    rows = [
        (
            choice.checkpoint.name(root),
            "" if choice.checkpoint.row.step is None else str(choice.checkpoint.row.step),
            number(choice.checkpoint.row.metric, none=""),
            size(choice.checkpoint.row.nbytes),
            choice.checkpoint.verdict,
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
