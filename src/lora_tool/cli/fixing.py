"""`validate --fix`: what is changed, as a diff."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lora_tool.core.display import counted, json_data, printable

if TYPE_CHECKING:
    from lora_tool.workflows.fix import Fixes

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def fixes_json(fixes: Fixes) -> list[dict[str, Any]]:
    """Return the changes as JSON data; `kept` is null where nothing was written."""
    kept = fixes.kept or (None,) * len(fixes.changes)
    return [
        json_data({"path": change.path, "codes": change.codes, "diff": change.diff, "kept": copy})
        for change, copy in zip(fixes.changes, kept, strict=True)
    ]


def fix_lines(fixes: Fixes, *, color: bool = False) -> Iterator[str]:
    """Yield the diff, and what was done or is to be typed."""
    for change in fixes.changes:
        for line in change.diff:
            fg = _COLOURS.get(line[:1]) if color else None
            yield click.style(printable(line), fg=fg) if fg else printable(line)
    if fixes.kept:
        for change, kept in zip(fixes.changes, fixes.kept, strict=True):
            yield f"changed {printable(str(change.path))}; the original is {printable(kept.name)}"
    elif fixes.changes:
        answered = {code for change in fixes.changes for code in change.codes}
        files = counted(len(fixes.changes), "file")
        codes = ", ".join(sorted(answered))
        yield f"--fix --apply would change {files} for {codes}, and keep each original as FILE.orig"
    else:
        yield "--fix has nothing to change"
