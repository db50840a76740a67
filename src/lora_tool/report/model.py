"""What a check says: findings, what was looked at, and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from lora_tool.display import counted
from lora_tool.errors import FindingsFound
from lora_tool.report.findings import Finding, Severity

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A rule that could not run on the folder `path`, and why."""

    code: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A folder that was looked at, what it is, and the codes of the rules that ran on it."""

    path: str
    kind: str
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A path that could not be opened or read at all, why, and what to do."""

    path: str
    message: str
    hint: str | None = None
    during: str | None = None
    """What could not be done, where that was not the reading: a stage of `ci`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A rule that was switched off, and the reason that the configuration gives."""

    code: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheckpoint:
    """One checkpoint of a training run. `loss` and `metric` are those of its step, None where none was logged."""

    path: str
    name: str
    step: int | None
    epoch: float | None
    loss: float | None
    metric: float | None
    nbytes: int
    """Bytes of all files in the folder, optimizer and all."""
    errors: int
    warnings: int
    codes: tuple[str, ...] = ()
    """The rules that found something, worst first; notes are left out."""

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong with it that would keep it from being used."""
        return not self.errors

    @property
    def verdict(self) -> str:
        """``good``, ``warned`` or ``broken``."""
        return "broken" if self.errors else "warned" if self.warnings else "good"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder: its checkpoints by step, and the best one that is whole."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...]
    metric: str | None = None
    """The name of the metric that checkpoints are compared by, ``eval_loss``; None where nothing was evaluated."""
    best: str | None = None
    """The path of the best checkpoint that is whole."""
    why_best: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What reports say about a rule itself."""

    code: str
    severity: Severity
    title: str
    text: str
    hint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one check of one or more folders."""

    subjects: tuple[Checked, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    runs: tuple[Run, ...] = ()
    unread: tuple[Unread, ...] = ()
    ignored: tuple[Ignored, ...] = ()

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, None without findings."""
        return max({finding.severity for finding in self.findings}, default=None)

    def at_least(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of that severity or worse."""
        bad = {other for other in Severity if other >= severity}
        return tuple(finding for finding in self.findings if finding.severity in bad)

    def count(self, severity: Severity) -> int:
        """Return how many findings have exactly that severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def raise_for_errors(self) -> None:
        """Return if there is no error. Raises `FindingsFound` naming the first one and how many there are."""
        self.raise_at(Severity.ERROR)

    def raise_at(self, severity: Severity, *, hint: str | None = None) -> None:
        """Return if no finding is of that severity or worse.

        Raises `FindingsFound`, which holds this report, names the first of the worst and says how many there are;
        `hint` takes the place of the finding's own.
        """
        found = self.at_least(severity)
        if found:
            first = next(finding for finding in found if finding.severity is self.worst)
            what = f"more {first.severity}" if len({finding.severity for finding in found}) == 1 else "more finding"
            more = f" (and {counted(len(found) - 1, what)})" if len(found) > 1 else ""
            raise FindingsFound(f"{first}{more}", hint=hint or first.hint, report=self)


def joined(reports: Iterable[Report]) -> Report:
    """Return one report of all the reports' contents, in their order. What is said twice is kept once."""
    listed = tuple(reports)
    return Report(
        subjects=tuple(subject for report in listed for subject in report.subjects),
        findings=_once(finding for report in listed for finding in report.findings),
        skipped=_once(skipped for report in listed for skipped in report.skipped),
        runs=tuple(run for report in listed for run in report.runs),
        unread=tuple(unread for report in listed for unread in report.unread),
        ignored=_once(ignored for report in listed for ignored in report.ignored),
    )


def _once(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def by_subject(report: Report) -> tuple[tuple[Checked, tuple[Finding, ...]], ...]:
    """Return each folder with the findings on it: those whose path lies in it and in no folder further in.

    The first folder has those that lie in none, as in a base model elsewhere.
    """
    if not report.subjects:
        return ()
    found: dict[str, list[Finding]] = {checked.path: [] for checked in report.subjects}
    first = report.subjects[0].path
    for finding in report.findings:
        path = finding.path
        while path and path not in found:
            path = path.rpartition("/")[0]
        found[path or first].append(finding)
    # a folder that was looked at twice, as an adapter and as rank files, is shown once
    kept: dict[str, Checked] = {}
    for checked in report.subjects:
        earlier = kept.get(checked.path)
        rules = checked.rules if earlier is None else tuple(sorted({*earlier.rules, *checked.rules}))
        kept[checked.path] = Checked(path=checked.path, kind=(earlier or checked).kind, rules=rules)
    return tuple((checked, tuple(found[path])) for path, checked in kept.items())
