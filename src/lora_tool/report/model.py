"""What a check says: findings, what was looked at, and what could not be checked."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from lora_tool.errors import FindingsFound


@enum.unique
class Severity(str, enum.Enum):
    """How bad a finding is. ERROR: it will not work, or not do what was trained. They compare by weight."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """3 for an error, 2 for a warning, 1 for info."""
        return {"error": 3, "warning": 2, "info": 1}[self.value]

    def __lt__(self, other: str) -> bool:
        return self.weight < Severity(other).weight

    def __le__(self, other: str) -> bool:
        return self.weight <= Severity(other).weight

    def __gt__(self, other: str) -> bool:
        return self.weight > Severity(other).weight

    def __ge__(self, other: str) -> bool:
        return self.weight >= Severity(other).weight

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: the rule's code, the file, the tensor or field in it, and what to do."""

    code: str
    severity: Severity
    path: str
    subject: str | None
    message: str
    hint: str | None

    def __str__(self) -> str:
        where = f"{self.path}: `{self.subject}`" if self.subject else self.path
        return f"{self.code} {where}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A rule that could not run on the folder `path`, and why."""

    code: str
    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A folder that was looked at, and what it is."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one check of one or more folders."""

    subjects: tuple[Checked, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, None without findings."""
        return max((finding.severity for finding in self.findings), default=None)

    def at_least(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of that severity or worse."""
        return tuple(finding for finding in self.findings if finding.severity >= severity)

    def count(self, severity: Severity) -> int:
        """Return how many findings have exactly that severity."""
        return sum(finding.severity is severity for finding in self.findings)

    def raise_for_errors(self) -> None:
        """Return if there is no error. Raises `FindingsFound` naming the first one and how many there are."""
        errors = self.at_least(Severity.ERROR)
        if errors:
            more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
            raise FindingsFound(f"{errors[0]}{more}", hint=errors[0].hint)


def joined(reports: Iterable[Report]) -> Report:
    """Return one report of all the reports' contents, in their order."""
    listed = tuple(reports)
    return Report(
        subjects=tuple(subject for report in listed for subject in report.subjects),
        findings=tuple(finding for report in listed for finding in report.findings),
        skipped=tuple(skipped for report in listed for skipped in report.skipped),
    )
