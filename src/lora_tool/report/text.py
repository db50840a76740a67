"""A report as text for people: findings under the file they are in, the same ones counted instead of repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import click

from lora_tool.display import printable
from lora_tool.report.model import Finding, Report, Severity, Skipped

_SHOWN = 3
"""How many findings of one rule in one file are spelled out before the rest is counted."""

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "blue"}
_SEVERITY_WIDTH = max(len(severity.value) for severity in Severity)
_INDENT = " " * (2 + _SEVERITY_WIDTH + 2 + len("LT000") + 2)


def report_text(report: Report, *, color: bool = False, limit: int = _SHOWN) -> str:
    """Return the findings, the skipped checks and one summary line. Nothing in it acts on a terminal but our colours."""
    return "\n".join(
        (*findings_lines(report.findings, color=color, limit=limit), *_skipped_lines(report.skipped), summary(report))
    )


def findings_lines(findings: Sequence[Finding], *, color: bool = False, limit: int = _SHOWN) -> Iterator[str]:
    """Yield the lines of the findings, by file, each rule with its hint once."""
    by_path: dict[str, list[Finding]] = {}
    for finding in findings:
        by_path.setdefault(finding.path, []).append(finding)
    hinted: set[tuple[str, str | None]] = set()
    for path, inside in by_path.items():
        yield click.style(printable(path), bold=True) if color else printable(path)
        for group in _groups(inside):
            for finding in group[:limit]:
                yield _line(finding, color=color)
            if len(group) > limit:
                yield f"{_INDENT}and {len(group) - limit} more like it (--json lists all)"
            yield from _hints(group, hinted, color=color)
        yield ""


def _groups(findings: Iterable[Finding]) -> Iterator[list[Finding]]:
    """Yield the findings of one file, worst first, those of one rule and severity together."""

    def order(finding: Finding) -> tuple[int, str]:
        return -finding.severity.weight, finding.code

    for _, group in itertools.groupby(sorted(findings, key=order), key=order):
        yield list(group)


def _line(finding: Finding, *, color: bool) -> str:
    severity = f"{finding.severity.value:<{_SEVERITY_WIDTH}}"
    if color:
        severity = click.style(severity, fg=_COLOURS[finding.severity])
    subject = f"{printable(finding.subject)}: " if finding.subject else ""
    return f"  {severity}  {finding.code}  {subject}{printable(finding.message)}"


def _hints(group: Sequence[Finding], hinted: set[tuple[str, str | None]], *, color: bool) -> Iterator[str]:
    for finding in group[:_SHOWN]:
        if finding.hint and (finding.code, finding.hint) not in hinted:
            hinted.add((finding.code, finding.hint))
            label = click.style("hint:", fg="cyan") if color else "hint:"
            yield f"{_INDENT}{label} {printable(finding.hint)}"


def _skipped_lines(skipped: Sequence[Skipped]) -> Iterator[str]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for item in skipped:
        by_reason.setdefault((item.path, item.reason), []).append(item.code)
    for (path, reason), codes in by_reason.items():
        yield f"skipped {spans(codes)} on {printable(path)}: {printable(reason)}"


def spans(codes: Iterable[str]) -> str:
    """Return sorted codes with neighbours joined: ``LT203, LT501-LT506``."""
    runs: list[tuple[str, str]] = []
    for code in sorted(codes):
        number = code.removeprefix("LT")
        if runs and number.isdecimal() and int(runs[-1][1].removeprefix("LT")) + 1 == int(number):
            runs[-1] = (runs[-1][0], code)
        else:
            runs.append((code, code))
    return ", ".join(first if first == last else f"{first}-{last}" for first, last in runs)


def summary(report: Report) -> str:
    """Return one line: what was looked at and how many findings there are."""
    kinds = [subject.kind for subject in report.subjects]
    looked_at = ", ".join(_counted(kinds.count(kind), kind) for kind in dict.fromkeys(kinds)) or "nothing"
    found = [
        _counted(report.count(severity), name)
        for severity, name in ((Severity.ERROR, "error"), (Severity.WARNING, "warning"), (Severity.INFO, "note"))
        if report.count(severity)
    ]
    skipped = [f"{len(report.skipped)} rules skipped"] if report.skipped else []
    return f"checked {looked_at}: {', '.join((found or ['no findings']) + skipped)}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
