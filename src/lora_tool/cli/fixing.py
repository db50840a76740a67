"""`validate --fix`: what is changed, as a diff, and with `--apply` written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from lora_tool.display import counted, json_data, printable
from lora_tool.report.model import Report
from lora_tool.validation.changes import FileChange
from lora_tool.validation.fixes import planned_changes

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


class Fixes(Struct, frozen=True, kw_only=True):
    """What answers the findings of a report that can be fixed mechanically, and where each file is kept as it was."""

    changes: tuple[FileChange, ...]
    kept: tuple[Path, ...] = ()
    """One for each change, where they were written."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return the changes as JSON data; `kept` is null where nothing was written."""
        kept = self.kept or (None,) * len(self.changes)
        return [
            json_data({"path": change.path, "codes": change.codes, "diff": change.diff, "kept": copy})
            for change, copy in zip(self.changes, kept, strict=True)
        ]

    def lines(self, *, color: bool = False) -> Iterator[str]:
        """Yield the diff, and what was done or is to be typed."""
        for change in self.changes:
            for line in change.diff:
                fg = _COLOURS.get(line[:1]) if color else None
                yield click.style(printable(line), fg=fg) if fg else printable(line)
        if self.kept:
            for change, kept in zip(self.changes, self.kept, strict=True):
                yield f"changed {printable(str(change.path))}; the original is {printable(kept.name)}"
        elif self.changes:
            answered = {code for change in self.changes for code in change.codes}
            files = counted(len(self.changes), "file")
            codes = ", ".join(sorted(answered))
            yield f"--fix --apply would change {files} for {codes}, and keep each original as FILE.orig"
        else:
            yield "--fix has nothing to change"


def fixes(report: Report, *, task: str | None, apply: bool) -> Fixes:
    """Return the fixes of what the report found, written if `apply`. Raises `ExecutionError`."""
    changes = planned_changes(report, task=task)
    if not apply:
        return Fixes(changes=changes)
    from lora_tool.execution.fixing import apply_change  # only where something is written

    return Fixes(changes=changes, kept=tuple(map(apply_change, changes)))
