"""Fixing configs and names mechanically: what answers the findings of a report, shown or written."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from lora_tool.core.report.model import Report
from lora_tool.plans.base.task import Task
from lora_tool.rules.changes import FileDiff
from lora_tool.workflows.fixes import planned_changes


class Fixes(Struct, frozen=True, kw_only=True):
    """The changes that answer findings, and where each file is kept as it was."""

    changes: tuple[FileDiff, ...]
    kept: tuple[Path, ...] = ()
    """One for each change, where they were written."""


def fix(report: Report, *, task: Task | str | None = None, apply: bool = False) -> Fixes:
    """Return the fixes of what the report found, written if `apply`. Raises `ExecutionError`."""
    changes = planned_changes(report, task=None if task is None else str(task))
    if not apply:
        return Fixes(changes=changes)
    from lora_tool.execution.fixing import apply_change  # only where something is written

    return Fixes(changes=changes, kept=tuple(map(apply_change, changes)))
