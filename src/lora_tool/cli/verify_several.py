"""`lora-tool verify` of several folders: each by itself, with one table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from lora_tool.cli.exit_codes import exit_code
from lora_tool.cli.reporting import Reporting, report_text
from lora_tool.cli.terminal import say, show_error, wants_colour
from lora_tool.display import as_cell, as_options, printable
from lora_tool.errors import LoraToolError, of_system
from lora_tool.report.forms import Form
from lora_tool.report.model import Report, Unread, joined

if TYPE_CHECKING:
    from lora_tool.verification.verified import Verification


class Seen(Struct, frozen=True, kw_only=True):
    """What became of one folder: its verification, or the `error` that stopped that, and the exit code of it alone."""

    folder: Path
    code: int
    verification: Verification | None = None
    error: LoraToolError | None = None

    @property
    def report(self) -> Report:
        """What was found; an error stands in it as a folder that could not be read."""
        if self.error is not None:
            return Report(unread=(Unread.of(str(self.folder), self.error),))
        return Report() if self.verification is None else self.verification.report

    def to_json(self) -> dict[str, Any]:
        """Return what `verify --json` says of one folder, or the error, with the folder and its exit code."""
        from lora_tool.verification.text import verification_json

        table: dict[str, Any] = {"path": printable(str(self.folder)), "exit_code": self.code}
        if self.verification is not None:
            return table | {"error": None} | verification_json(self.verification)
        [unread] = self.report.unread
        return table | {"error": {"message": unread.message, "hint": unread.hint}}


def verify_several(
    folders: Sequence[Path],
    verified: Callable[[Path], Verification],
    code_of: Callable[[Verification], int],
    told: Reporting,
    *,
    quiet: bool,
) -> int:
    """Verify each folder and report; return the exit code of the worst. What stops one stops no other."""
    seen = [_seen(folder, verified, code_of) for folder in folders]
    report = joined(each.report for each in seen)
    for each in seen:
        if each.error is not None:
            show_error(each.error)
    if told.form is Form.JSON:
        click.echo(_json(seen))
    elif told.form is not Form.TEXT:
        click.echo(report_text(report, told.form, told.least))
    elif report.findings or not quiet:
        say(report_text(report, Form.TEXT, told.least, color=wants_colour()))
        _show_table(seen)
    told.write_files(lambda form: _json(seen) if form is Form.JSON else report_text(report, form, told.least))
    return max(each.code for each in seen)


def _seen(folder: Path, verified: Callable[[Path], Verification], code_of: Callable[[Verification], int]) -> Seen:
    try:
        verification = verified(folder)
    except LoraToolError as error:
        return Seen(folder=folder, code=exit_code(error), error=error)
    except OSError as failed:
        told = of_system(failed, folder)
        return Seen(folder=folder, code=exit_code(told), error=told)
    return Seen(folder=folder, code=code_of(verification), verification=verification)


def _json(seen: Sequence[Seen]) -> str:
    folders = [each.to_json() for each in seen]
    return json.dumps({"schema_version": 1, "folders": folders}, indent=2, allow_nan=False)


def _show_table(seen: Sequence[Seen]) -> None:
    from lora_tool.cli.tables import new_table, print_all  # rich, only where it is shown

    columns = ("folder", "verdict", "tensors>", "max error>", "pairs right>", "why not")
    print_all([new_table(columns, [tuple(_row(each)) for each in seen])], sys.stdout)


def _row(seen: Seen) -> Iterator[str]:
    yield str(seen.folder)
    found = seen.verification
    if found is None:
        yield from ("not verified", "", "", "", as_cell(as_options(str(seen.error))))
        return
    from lora_tool.verification.verified import summary_json

    summary = summary_json(found)
    yield "failed" if seen.code else "right"
    yield f"{summary['right']} of {summary['tensors']}"
    yield "" if summary["largest_ulps"] is None else f"{summary['largest_ulps']:.2f} ulp"
    yield "" if found.pairs is None else f"{found.pairs.merged.accuracy:.3f}"
    yield as_cell(str(found.report.findings[0])) if seen.code and found.report.findings else ""
