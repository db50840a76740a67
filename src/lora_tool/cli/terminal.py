"""Saying something to a person: in colour where that is wanted, and so that no name from a file acts on a terminal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lora_tool.core.display import as_options, json_data, printable, shortened
from lora_tool.core.errors import FindingsFound, LoraToolError

if TYPE_CHECKING:
    from lora_tool.core.report.findings import Finding

_COLOURS = {"error": "red", "warning": "yellow", "hint": "cyan"}


def wants_colour() -> bool:
    """Return whether stdout is a terminal whose user has not set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


_TO_COPY = re.compile(r"\s*(?:hint:|next:|lora-tool\s|\$ )|.*\blora-tool [a-z]+ ")
"""How lines look that somebody copies, or parts of them: one that is broken is no command any more."""
_BEGINNING = re.compile(r"(?:\s*(?:error|warning|info)\s+LT\d{3}  |\s*)")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_NARROWEST = 40


def say(text: str, *, err: bool = False) -> None:
    """Write the text to stdout, or stderr; on a terminal its long lines are broken between words, not inside one."""
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        columns = shutil.get_terminal_size().columns
        text = "\n".join(folded(line, columns) for line in text.split("\n"))
    click.echo(text, err=err)


def folded(line: str, columns: int) -> str:
    """Return the line broken between words where it is longer than `columns`, what follows indented; one to copy whole."""
    plain = _STYLE.sub("", line)
    if len(plain) <= columns or columns < _NARROWEST or _TO_COPY.match(plain):
        return line
    begins = _BEGINNING.match(plain)
    indent = len(begins[0]) if begins and begins[0].strip() else len(plain) - len(plain.lstrip()) + 2
    lines, room = [""], columns
    for part in re.split(r"(?<=\S)(?=\s)", line):  # each word with the spaces before it
        held, adds = (len(_STYLE.sub("", text)) for text in (lines[-1], part))
        if lines[-1].strip() and held + adds > room:
            lines.append(f"{' ' * indent}{part.lstrip()}")
        else:
            lines[-1] += part
    return "\n".join(lines)


def tell(label: str, text: str) -> None:
    """Write ``label: text`` to stderr as one line: a line break in it could start a CI system's command."""
    styled = click.style(f"{label}:", fg=_COLOURS.get(label), bold=label == "error")
    colour = False if os.environ.get("NO_COLOR") else None
    try:
        line = f"{styled} {shortened(printable(as_options(text)))}"
        if sys.stderr.isatty():
            line = folded(line, shutil.get_terminal_size().columns)
        click.echo(line, err=True, color=colour)
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
    from lora_tool.core.report.findings import Severity  # no word of help needs it

    shown = tuple(finding for finding in findings if finding.severity > Severity.INFO)
    if not shown:
        return
    from lora_tool.core.report.model import Report  # where there are findings
    from lora_tool.core.report.text import findings_lines

    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for line in findings_lines(shown, color=colour):
        say(line, err=True)
    click.echo(Report(findings=shown).counts(), err=True)


def leave_stdout() -> None:
    """Let what would still be written to stdout go nowhere: it cannot be written, or its reader has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_error(error: LoraToolError, code: int | None = None, *, as_json: bool = False) -> None:
    """Write the error and its hint to stderr, or the findings that it is about, which have their own.

    With `as_json` it is written to stdout as well, with the exit `code`.
    """
    findings = error.report.findings if isinstance(error, FindingsFound) and error.report is not None else ()
    if findings:
        show_findings(findings)
    else:
        tell("error", str(error))
    if as_json:
        from lora_tool.core.report.json import finding_json  # for programs, where it failed

        hint = error.hint and as_options(error.hint)
        said = {"message": as_options(str(error)), "hint": hint, "exit_code": code}
        try:
            print_json(error=said, findings=[finding_json(finding) for finding in findings])
        except OSError:  # stderr has it; the exit code is that of the error
            leave_stdout()
    if error.hint and error.hint not in {finding.hint for finding in findings}:
        tell("hint", error.hint)


_OUTPUT = ("-o", "--output")


def as_typed(text: str) -> str:
    """Return `text` as `retyped` does with the words of this call but its output, which exists by then."""
    context = click.get_current_context(silent=True)
    words: Sequence[str] = () if context is None else context.find_root().obj or ()
    named = {at + 1 for at, word in enumerate(words) if word in _OUTPUT}
    kept = (word for at, word in enumerate(words) if at not in named and word.partition("=")[0] not in _OUTPUT)
    return retyped(text, tuple(kept))


def retyped(text: str, words: Sequence[str]) -> str:
    """Return `text` with the `words` that were typed in the command that it ends with, if that names the same command.

    It has to name a folder in the one that was typed, or in the working directory where only options were; or the
    folders that were typed, and what else they need.
    """
    begin, found, command = text.rpartition("lora-tool ")
    suggested = shlex.split(command) if found and "`" not in command and command.count("'") % 2 == 0 else []
    if list(words[:1]) != suggested[:1]:
        return text
    if suggested[-2:] == ["-o", "OUT"] and any(word.partition("=")[0] in _OUTPUT for word in words):
        suggested = suggested[:-2]
    if len(suggested) != len(("merge", "PATH")):
        return f"{begin}lora-tool {shlex.join(whole)}" if (whole := _with_others(suggested, words)) else text
    path = Path(suggested[1])
    typed = [word for word in words[1:] if not word.startswith("-") and Path(word) in path.parents]
    if len(typed) == 1:
        return f"{begin}lora-tool {shlex.join(suggested[1] if word == typed[0] else word for word in words)}"
    only_options = all(word.startswith("-") for word in words[1:]) and not path.is_absolute()
    return f"{begin}lora-tool {shlex.join([*words, suggested[1]])}" if only_options else text


_WITH_VALUES = ("--base", "--adapter", *_OUTPUT)
"""Options of suggested commands whose typed values are not repeated."""


def _with_others(suggested: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return a suggested command with its folders' weights and the other words as typed; none if they are other folders."""
    options = {word for word in suggested if word.startswith("-")}
    first = next((at for at, word in enumerate(suggested) if word in options), len(suggested))
    typed = {word.rpartition("=")[0] or word: word for word in words}
    folders = [typed.get(word, "") for word in suggested[1:first]]
    if not all(folders) or not folders:
        return []
    again = options.intersection(_WITH_VALUES) | ({*_OUTPUT} if options.intersection(_OUTPUT) else set())
    left, said = [], {*suggested, *folders}
    for before, word in itertools.pairwise(words):
        if word not in said and before not in again and word.partition("=")[0] not in again:
            left.append(word)
    return [suggested[0], *folders, *suggested[first:], *left]


@contextlib.contextmanager
def progress_bar(description: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes just done, from any thread; the bar is where somebody watches."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console  # only where somebody watches

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
