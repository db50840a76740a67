"""An inventory, and what pruning would do with it, as tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.text import Text

from lora_tool.cli.tables import new_table, number, print_all
from lora_tool.display import printable, size
from lora_tool.inventory import Choice, Content, Inventory, Listed

_COLOURS = {"good": "green", "warned": "yellow", "broken": "red"}


def show_inventory(runs: Sequence[Inventory], root: Path, out: TextIO) -> None:
    """Write one line per checkpoint, and the totals."""
    listed = [(run, item) for run in runs for item in run.checkpoints]
    if not listed:
        print_all([f"no checkpoints under {printable(str(root))}"], out)
        return
    table = new_table(
        "checkpoint", "kind", "step>", "loss>", "metric>", *(f"{content}>" for content in Content), "verdict"
    )
    for run, item in listed:
        star = " *" if item.best and len(run.checkpoints) > 1 else ""
        table.add_row(
            Text(printable(_name(item, root)) + star),
            item.kind,
            "" if item.row.step is None else str(item.row.step),
            _number(item.row.loss),
            _number(item.row.metric)
            + (f" {printable(run.metric)}" if run.metric and item.row.metric is not None else ""),
            *(size(item.sizes[content]) if item.sizes[content] else "" for content in Content),
            Text(_verdict(item), style=_COLOURS[item.row.verdict]),
        )
    totals = {content: sum(item.sizes[content] for _, item in listed) for content in Content}
    kinds = ", ".join(f"{content} {size(total)}" for content, total in totals.items() if total)
    print_all([table, f"{_count(len(listed))}, {size(sum(totals.values()))}: {kinds}"], out)


def show_choices(choices: Sequence[Choice], root: Path, out: TextIO, *, done: bool) -> None:
    """Write what is kept and what goes, with the reason, and how much that frees."""
    table = new_table("checkpoint", "step>", "metric>", "size>", "verdict", "", "because")
    for choice in choices:
        row = choice.checkpoint.row
        what = Text("goes", style="red") if choice.goes else Text("stays", style="green")
        table.add_row(
            Text(printable(_name(choice.checkpoint, root))),
            "" if row.step is None else str(row.step),
            _number(row.metric),
            size(row.nbytes),
            _verdict(choice.checkpoint),
            what,
            str(choice.why),
        )
    going = [choice.checkpoint for choice in choices if choice.goes]
    freed = size(sum(item.row.nbytes for item in going))
    if not choices:
        print_all([f"no checkpoint-N folders under {printable(str(root))}"], out)
    elif not going:
        print_all([table, "nothing to remove"], out)
    elif done:
        print_all([table, f"removed {_count(len(going))}, {freed}"], out)
    else:
        print_all([table, f"would remove {_count(len(going))} and free {freed}; --apply does it"], out)


def _name(item: Listed, root: Path) -> str:
    return str(item.root.relative_to(root)) if item.root.is_relative_to(root) else str(item.root)


def _verdict(item: Listed) -> str:
    return item.row.verdict + (f": {', '.join(item.row.codes)}" if item.row.codes else "")


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _count(n: int) -> str:
    return f"{n} checkpoint" if n == 1 else f"{n} checkpoints"
