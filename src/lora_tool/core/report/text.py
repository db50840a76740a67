"""A report as text for people: findings under the file they are in, the same ones counted instead of repeated."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lora_tool.core.display import four_digits, printable, size
from lora_tool.core.report.findings import Finding, Ignored, Run, RunCheckpoint, Severity, Skipped

T = TypeVar("T")
K = TypeVar("K")

SHOWN = 3
"""How many findings of one rule in one file, and how many skipped rules, are spelled out."""

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "blue"}
_SEVERITY_WIDTH = max(len(severity.value) for severity in Severity)
_CODE_WIDTH = 5
_INDENT = " " * (2 + _SEVERITY_WIDTH + 2 + _CODE_WIDTH + 2)


def findings_lines(findings: Sequence[Finding], *, color: bool = False, limit: int = SHOWN) -> Iterator[str]:
    """Yield the lines of the findings, by file, each rule with its hint once."""
    hinted: set[tuple[str, str | None]] = set()
    for path, inside in grouped(findings, lambda finding: finding.path).items():
        yield _styled(printable(path), bold=True) if color else printable(path)
        for group in by_rule(inside):
            for finding in group[:limit]:
                yield _line(finding, color=color)
            if len(group) > limit:
                yield f"{_INDENT}and {len(group) - limit} more like it (--json lists all)"
            yield from _hints(group, hinted, color=color)
        yield ""


def _styled(text: str, **style: Any) -> str:
    import click  # only for colours

    return click.style(text, **style)


def _line(finding: Finding, *, color: bool) -> str:
    severity = f"{finding.severity.value:<{_SEVERITY_WIDTH}}"
    if color:
        severity = _styled(severity, fg=_COLOURS[finding.severity])
    subject = f"{printable(finding.subject)}: " if finding.subject else ""
    return f"  {severity}  {finding.code}  {subject}{printable(finding.message)}"


def _hints(group: Sequence[Finding], hinted: set[tuple[str, str | None]], *, color: bool) -> Iterator[str]:
    for finding in group[:SHOWN]:
        if finding.hint and (finding.code, finding.hint) not in hinted:
            hinted.add((finding.code, finding.hint))
            label = _styled("hint:", fg="cyan") if color else "hint:"
            yield f"{_INDENT}{label} {printable(finding.hint)}"


def run_lines(run: Run, *, color: bool = False) -> Iterator[str]:
    """Yield the table of a run's checkpoints, and which is the best good one."""
    yield _styled(printable(run.path), bold=True) if color else printable(run.path)
    header = ["checkpoint", "step", "epoch", "loss", printable(run.metric or ""), "size", "verdict"]
    rows = [header]
    for row in run.checkpoints:
        rows.append([printable(row.name), *run_cells(row)])
        rows[-1][-1] += "  <- best" if row.path == run.best else ""
    kept = [at for at in range(len(header)) if header[at]]  # nothing was evaluated: no column for it
    widths = [max(len(row[at]) for row in rows) for at in range(len(header))]
    for index, cells in enumerate(rows):
        line = "  ".join((cells[0].ljust(widths[0]), *(cells[at].rjust(widths[at]) for at in kept[1:-1]), cells[-1]))
        yield f"  {_styled(line, fg=_verdict_colour(run.checkpoints[index - 1])) if color and index else line}"
    if run.best is not None:
        yield f"  best complete checkpoint: {printable(run.best)} ({printable(run.why_best or '')})"
    elif run.checkpoints:
        yield "  no checkpoint is complete"


def run_cells(row: RunCheckpoint) -> tuple[str, ...]:
    """Return step, epoch, loss, metric, size and verdict of a run's checkpoint, as all tables show them."""
    codes = f" {', '.join(row.codes)}" if row.codes else ""
    step = "-" if row.step is None else str(row.step)
    return (step, *map(four_digits, (row.epoch, row.loss, row.metric)), size(row.nbytes), f"{row.verdict}{codes}")


def _verdict_colour(row: RunCheckpoint) -> str:
    return {"good": "green", "broken": "red"}.get(row.verdict, "yellow")


def ignored_lines(ignored: Sequence[Ignored]) -> Iterator[str]:
    """Yield a line for each reason why rules are ignored."""
    for reason, rules in grouped(ignored, lambda item: item.reason).items():
        if reason:  # what was typed on the command line needs no repeating
            yield f"ignored {spans(item.code for item in rules)}: {printable(reason)}"


def skipped_lines(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yield a line for each reason why rules could not run."""
    for codes, paths, reason in by_reason(skipped):
        where = printable(paths[0]) if len(paths) == 1 else f"{len(paths)} folders, {printable(paths[0])} the first"
        what, listed = (spans(codes), "") if len(codes) <= SHOWN else (f"{len(codes)} rules", "; --verbose lists them")
        yield f"skipped {what} on {where}: {printable(reason)}{listed}"


def spans(codes: Iterable[str]) -> str:
    """Return sorted codes with neighbours joined: ``LT203, LT501-LT506``."""
    runs: list[tuple[str, str]] = []
    for code in sorted(codes):
        at = code.removeprefix("LT")
        if runs and at.isdecimal() and int(runs[-1][1].removeprefix("LT")) + 1 == int(at):
            runs[-1] = (runs[-1][0], code)
        else:
            runs.append((code, code))
    return ", ".join(first if first == last else f"{first}-{last}" for first, last in runs)


# Findings of one rule and severity are one thing to mend, however many tensors they are about.


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items that have the same `key` together, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_rule(findings: Iterable[Finding]) -> Iterator[tuple[Finding, ...]]:
    """Yield the findings of one rule and severity together, worst first, then by code."""
    groups = grouped(findings, lambda finding: (-finding.severity.weight, finding.code))
    yield from (tuple(group) for _, group in sorted(groups.items(), key=lambda group: group[0]))


def relative_to(path: str, root: Path) -> str | None:
    """Return `path` relative to the folder `root`, with forward slashes; None where it lies outside of it."""
    absolute = os.path.normpath(root / path)
    inside = os.path.relpath(absolute, root)
    outside = inside == os.pardir or inside.startswith(os.pardir + os.sep)
    return None if outside else inside.replace(os.sep, "/")


def by_reason(skipped: Iterable[Skipped]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Yield codes, folders and reason: what was skipped for one reason on many checkpoints of a run is one line."""
    on_a_folder = grouped(skipped, lambda item: (item.path, item.reason)).values()
    alike = grouped(on_a_folder, lambda items: (tuple(item.code for item in items), items[0].reason))
    for (codes, reason), folders in alike.items():
        yield codes, tuple(items[0].path for items in folders), reason
