"""Listing every checkpoint under a folder, run by run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.checkpoints.sources import Wanted, located
from lora_tool.core.display import as_html, counted, json_data, number, printable, size
from lora_tool.core.options import named_in_errors
from lora_tool.core.tables import TextTable
from lora_tool.verification.validating import Criteria
from lora_tool.workflows.inventory import FileRole, Inventory, Listed, inventory


class Listing(Struct, frozen=True, kw_only=True):
    """The checkpoints under `root`, run by run; a loop over it gives the runs."""

    root: Path
    runs: tuple[Inventory, ...]

    def __iter__(self) -> Iterator[Inventory]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, at: int) -> Inventory:
        return self.runs[at]

    @property
    def checkpoints(self) -> tuple[Listed, ...]:
        """All checkpoints, run after run."""
        return tuple(item for run in self.runs for item in run.checkpoints)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary}" if self.checkpoints else self.summary

    def __repr__(self) -> str:
        return f"Listing({counted(len(self.runs), 'run')}: {self.summary})"

    def _repr_html_(self) -> str:
        return (self.table().html() if self.checkpoints else "") + as_html(self.summary)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        table: dict[str, Any] = json_data({"schema_version": 1, "root": self.root, "runs": self.runs})
        return table

    @property
    def summary(self) -> str:
        """How many checkpoints there are, and how large they are."""
        if not self.checkpoints:
            return f"no checkpoints under {printable(str(self.root))}"
        totals = {content: sum(item.sizes[content] for item in self.checkpoints) for content in FileRole}
        kinds = ", ".join(f"{content} {size(total)}" for content, total in totals.items() if total)
        return f"{counted(len(self.checkpoints), 'checkpoint')}, {size(sum(totals.values()))}: {kinds}"

    def table(self, *, by_content: bool = False) -> TextTable:
        """Return a row for each checkpoint; `by_content` has its size by what the files are for."""
        contents = [f"{content}>" for content in FileRole] if by_content else ["size>"]
        rows = []
        for run in self.runs:
            for item in run.checkpoints:
                star = " *" if item.best and len(run.checkpoints) > 1 else ""
                metric = f" {run.metric}" if run.metric and item.row.metric is not None else ""
                sizes = [item.sizes[content] for content in FileRole] if by_content else [item.row.nbytes]
                rows.append(
                    (
                        item.name(self.root) + star,
                        f"adapters {', '.join(item.adapters)}" if item.adapters else item.kind,
                        "" if item.row.step is None else str(item.row.step),
                        number(item.row.loss, none=""),
                        number(item.row.metric, none="") + metric,
                        *(size(nbytes) if nbytes else "" for nbytes in sizes),
                        item.verdict,
                    )
                )
        columns = ("checkpoint", "kind", "step>", "loss>", "metric>", *contents, "verdict")
        return TextTable(columns=columns, rows=tuple(rows))


@named_in_errors
def ls(root: str | os.PathLike[str] = ".", *, criteria: Criteria | None = None) -> Listing:
    """Return every checkpoint under `root`, run by run, each with its verdict under the `criteria`, by default all rules.

    `root` may be an adapter on the Hub. Raises as `checkpoints.sources.resolve`.
    """
    folder = located(root, Wanted.ADAPTER).path
    return Listing(root=folder, runs=tuple(inventory(folder, criteria or Criteria())))
