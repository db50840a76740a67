"""A report as annotations of a GitHub Actions step.

A workflow command is a line ``::error file=…,title=…::message``; in it %, CR and LF are escaped, and in properties
also `:` and `,` (https://github.com/actions/toolkit, `packages/core/src/command.ts`). GitHub shows ten errors, ten
warnings and ten notices of a step and drops the rest without a word, so there is one annotation per rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lora_tool.core.display import printable
from lora_tool.core.report.findings import Finding, Severity
from lora_tool.core.report.model import Page, Report, Unread
from lora_tool.core.report.text import by_rule, relative_to, spans

CAP = 10
"""Annotations of one kind that GitHub shows for a step."""

_SHOWN = 3
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def report_github(report: Report, *, pages: Mapping[str, Page], root: Path) -> str:
    """Return the workflow commands, at most `CAP` of a kind, and the summary line. Paths are relative to `root`."""
    return "\n".join((*_annotations(report, pages, root), report.summary()))


def _annotations(report: Report, pages: Mapping[str, Page], root: Path) -> Iterator[str]:
    groups = list(by_rule(report.findings))
    for severity, kind in _COMMANDS.items():
        mine = [group for group in groups if group[0].severity is severity]
        unread = report.unread if severity is Severity.ERROR else ()
        commands = [_unread(item, root) for item in unread]
        commands += [_annotation(kind, group, pages, root) for group in mine]
        if len(commands) <= CAP:
            yield from commands
            continue
        yield from commands[: CAP - 1]
        left = mine[max(0, CAP - 1 - len(unread)) :]
        codes = spans(sorted({group[0].code for group in left}))
        number = len(commands) - CAP + 1
        yield _command(kind, {"title": f"{number} more"}, f"{number} more annotations omitted: {codes}")


def _annotation(kind: str, group: Sequence[Finding], pages: Mapping[str, Page], root: Path) -> str:
    first = group[0]
    page = pages.get(first.code)
    count = f" ({len(group)} times)" if len(group) > 1 else ""
    title = f"{first.code} {page.title if page else ''}".rstrip() + count
    lines = [_line(finding) for finding in group[:_SHOWN]]
    if len(group) > _SHOWN:
        lines.append(f"and {len(group) - _SHOWN} more like it")
    if first.hint:
        lines.append(f"hint: {printable(first.hint)}")
    return _command(kind, {"file": _file(first.path, root), "title": title}, "\n".join(lines))


def _line(finding: Finding) -> str:
    subject = f"{printable(finding.subject)}: " if finding.subject else ""
    return f"{subject}{printable(finding.message)} [{printable(finding.path)}]"


def _unread(unread: Unread, root: Path) -> str:
    hint = f"\nhint: {printable(unread.hint)}" if unread.hint else ""
    title = f"{unread.during} failed" if unread.during else "cannot be read"
    return _command("error", {"file": _file(unread.path, root), "title": title}, printable(unread.message) + hint)


def _file(path: str, root: Path) -> str:
    inside = relative_to(path, root)
    return printable(path if inside is None else inside)


def _command(kind: str, properties: Mapping[str, str], message: str) -> str:
    named = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{kind} {named}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
