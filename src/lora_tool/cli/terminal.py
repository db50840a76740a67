"""Saying something to a person: in colour where that is wanted, and so that no name from a file acts on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import click

from lora_tool.display import as_options, json_data, printable, shortened
from lora_tool.errors import FindingsFound, LoraToolError

if TYPE_CHECKING:
    from lora_tool.report.findings import Finding

_COLOURS = {"error": "red", "warning": "yellow", "hint": "cyan"}


def wants_colour() -> bool:
    """Return whether stdout is a terminal whose user has not set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def tell(label: str, text: str) -> None:
    """Write ``label: text`` to stderr as one line: a line break in it could start a CI system's command."""
    styled = click.style(f"{label}:", fg=_COLOURS.get(label), bold=label == "error")
    colour = False if os.environ.get("NO_COLOR") else None
    try:
        click.echo(f"{styled} {shortened(printable(as_options(text)))}", err=True, color=colour)
    except OSError:
        # nobody reads stderr any more, and the work goes on; what is left in the buffer must not fail when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def warn(text: str) -> None:
    """Write a warning to stderr."""
    tell("warning", text)


def print_json(**table: object) -> None:
    """Write frozen data to stdout as JSON: names from files are escaped, NaN and infinities are null."""
    click.echo(json.dumps({"schema_version": 1, **json_data(table)}, indent=2))


def show_findings(findings: Iterable[Finding]) -> None:
    """Write errors and warnings to stderr as `validate` prints them, and how many there are."""
    from lora_tool.report.findings import Severity  # noqa: PLC0415 - no word of help needs it

    shown = tuple(finding for finding in findings if finding.severity > Severity.INFO)
    if not shown:
        return
    from lora_tool.report.model import Report  # noqa: PLC0415 - where there are findings
    from lora_tool.report.text import findings_lines  # noqa: PLC0415

    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for line in findings_lines(shown, color=colour):
        click.echo(line, err=True)
    click.echo(Report(findings=shown).counts(), err=True)


def show_error(error: LoraToolError) -> None:
    """Write the error and its hint to stderr, or the findings that it is about, which have their own."""
    findings = error.report.findings if isinstance(error, FindingsFound) and error.report is not None else ()
    if findings:
        show_findings(findings)
    else:
        tell("error", str(error))
    if error.hint and error.hint not in {finding.hint for finding in findings}:
        tell("hint", error.hint)


@contextlib.contextmanager
def progress_bar(description: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes just done, from any thread; the bar is where somebody watches."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415 - only where somebody watches

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
