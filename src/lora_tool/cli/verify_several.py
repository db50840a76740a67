"""`lora-tool verify` of several folders: each by itself, with one table at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click

from lora_tool.cli.exit_codes import DONE, exit_code
from lora_tool.cli.reporting import Reporting, report_text
from lora_tool.cli.terminal import say, show_error, wants_colour
from lora_tool.core.display import as_cell, as_options, printable
from lora_tool.core.report.forms import Form
from lora_tool.core.report.model import joined
from lora_tool.workflows.caller import Caller
from lora_tool.workflows.verify import VerifiedOne, VerifyOptions, verify_each


def show_each(
    folders: Sequence[str], options: VerifyOptions, caller: Caller, reporting: Reporting, *, quiet: bool
) -> int:
    """Verify each folder and report; return the exit code of the worst. What stops one stops no other."""
    seen = [_Seen(one=one, code=_code_of(one, reporting)) for one in verify_each(folders, options, caller)]
    report = joined(each.one.report for each in seen)
    for each in seen:
        if each.one.error is not None:
            show_error(each.one.error)
    if reporting.form is Form.JSON:
        click.echo(_json(seen))
    elif reporting.form is not Form.TEXT:
        click.echo(report_text(report, reporting.form, reporting.least))
    elif report.findings or not quiet:
        say(report_text(report, Form.TEXT, reporting.least, color=wants_colour()))
        from lora_tool.cli.tables import show_table  # rich, only where it is shown

        columns = ("folder", "verdict", "tensors>", "max error>", "pairs right>", "why not")
        show_table(columns, map(_row, seen))
    reporting.write_files(lambda form: _json(seen) if form is Form.JSON else report_text(report, form, reporting.least))
    return max(each.code for each in seen)


class _Seen(NamedTuple):
    """What became of one folder, with its own exit code."""

    one: VerifiedOne
    code: int

    def to_json(self) -> dict[str, Any]:
        """Return what `verify --json` says of one folder, or the error, with the folder and its exit code."""
        table: dict[str, Any] = {"path": printable(str(self.one.folder)), "exit_code": self.code}
        if self.one.verification is not None:
            return table | {"error": None} | self.one.verification.to_json()
        [unread] = self.one.report.unread
        return table | {"error": {"message": unread.message, "hint": unread.hint}}


def _code_of(one: VerifiedOne, reporting: Reporting) -> int:
    if one.verification is not None:
        return reporting.code_of(one.verification)
    return DONE if one.error is None else exit_code(one.error)


def _json(seen: Sequence[_Seen]) -> str:
    folders = [each.to_json() for each in seen]
    return json.dumps({"schema_version": 1, "folders": folders}, indent=2, allow_nan=False)


def _row(seen: _Seen) -> Iterator[str]:
    yield str(seen.one.folder)
    found = seen.one.verification
    if found is None:
        yield from ("not verified", "", "", "", as_cell(as_options(str(seen.one.error))))
        return
    from lora_tool.verification.verified import summary_json

    summary = summary_json(found)
    yield "failed" if seen.code else "right"
    yield f"{summary['right']} of {summary['tensors']}" if found.served is None else ""
    yield "" if summary["largest_ulps"] is None else f"{summary['largest_ulps']:.2f} ulp"
    yield "" if found.pairs is None else f"{found.pairs.merged.accuracy:.3f}"
    yield as_cell(str(found.report.findings[0])) if seen.code and found.report.findings else ""
