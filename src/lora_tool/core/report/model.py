"""What a check says: findings, what was looked at, and what could not be checked."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.display import counted, shortened, some
from lora_tool.core.errors import FindingsFound
from lora_tool.core.records import Shown
from lora_tool.core.report.findings import Checked, Finding, Ignored, Page, Run, Severity, Skipped, Unread
from lora_tool.core.report.json import SCHEMA_VERSION, finding_json, record
from lora_tool.core.report.text import SHOWN, findings_lines, ignored_lines, run_lines, skipped_lines
from lora_tool.core.version import __version__

__all__ = ["Checked", "Ignored", "Page", "Report", "Skipped", "Unread", "by_subject", "joined"]

_COLUMNS = [
    "path",
    "name",
    "step",
    "epoch",
    "loss",
    "metric",
    "verdict",
    "incomplete",
    "unresumable",
    "errors",
    "warnings",
    "codes",
]
"""Fields of a run's checkpoint in JSON."""


class Report(Shown, Struct, frozen=True, kw_only=True):
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
        return tuple(finding for finding in self.findings if finding.severity.weight >= severity.weight)

    def count(self, severity: Severity) -> int:
        """Return how many findings have exactly that severity."""
        return [finding.severity for finding in self.findings].count(severity)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        paths = some([subject.path for subject in self.subjects], 3)
        return f"Report({paths}: {shortened(self.counts(), 300)})"

    def text(self, *, color: bool = False, limit: int = SHOWN) -> str:
        """Return the findings, run tables, skipped checks and one summary line, as the command prints them.

        Of findings that are alike in a file, `limit` are spelled out. Nothing in it acts on a terminal but the colours
        that `color` asks for.
        """
        lines = [*findings_lines(self.findings, color=color, limit=limit)]
        for run in self.runs:
            lines += [*run_lines(run, color=color), ""]
        lines += [*ignored_lines(self.ignored), *skipped_lines(self.skipped), self.summary()]
        worst = [finding for finding in self.at_least(Severity.WARNING) if finding.severity is self.worst]
        if worst:  # in the file that stands first above
            code = min(finding.code for finding in worst if finding.path == worst[0].path)
            lines.append(f"lora-tool rules {code} explains the first of them")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as JSON data, `validate --json`. Names from files are escaped as in the text form."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": __version__,
            "subjects": [record(subject, "path", "kind", "rules", "formats") for subject in self.subjects],
            "findings": [finding_json(finding) for finding in self.findings],
            "skipped": [record(skipped, "code", "path", "reason") for skipped in self.skipped],
            "ignored": [record(ignored, "code", "reason") for ignored in self.ignored],
            "unread": [record(unread, "path", "message", "hint") for unread in self.unread],
            "runs": [
                {
                    **record(run, "path", "metric", "best", "why_best"),
                    "checkpoints": [{**record(row, *_COLUMNS), "bytes": row.nbytes} for row in run.checkpoints],
                }
                for run in self.runs
            ],
            "summary": {
                "subjects": len(self.subjects),
                "errors": self.count(Severity.ERROR),
                "warnings": self.count(Severity.WARNING),
                "infos": self.count(Severity.INFO),
                "skipped": len(self.skipped),
                "unread": len(self.unread),
            },
        }

    def summary(self) -> str:
        """Return one line: what was looked at and how many findings there are."""
        kinds = [subject.kind for subject in self.subjects]
        looked_at = []
        for kind in dict.fromkeys(kinds):
            formats = dict.fromkeys(
                each for subject in self.subjects if subject.kind == kind for each in subject.formats
            )
            looked_at.append(counted(kinds.count(kind), kind) + (f" ({', '.join(formats)})" if formats else ""))
        found = [
            counted(self.count(severity), name)
            for severity, name in ((Severity.ERROR, "error"), (Severity.WARNING, "warning"), (Severity.INFO, "note"))
            if self.count(severity)
        ]
        skipped = [f"{counted(len(self.skipped), 'rule')} skipped"] if self.skipped else []
        return f"checked {', '.join(looked_at) or 'nothing'}: {', '.join((found or ['no findings']) + skipped)}"

    def counts(self) -> str:
        """Return how many errors and warnings there are, and their codes."""
        found = [(self.count(severity), severity.value) for severity in (Severity.ERROR, Severity.WARNING)]
        numbers = [counted(count, what) for count, what in found if count]
        codes = dict.fromkeys(finding.code for finding in self.at_least(Severity.WARNING))
        return f"{', '.join(numbers)}: {', '.join(codes)}" if numbers else "no findings"

    def raise_for_errors(self) -> None:
        """Return if there is no error. Raises `FindingsFound` naming the first one and how many there are."""
        self.raise_at(Severity.ERROR)

    def raise_at(self, severity: Severity, *, hint: str | None = None) -> None:
        """Return if every finding is less severe than that.

        Raises `FindingsFound`, which holds this report, names the first of the worst findings and says how many there
        are; `hint` replaces the finding's own.
        """
        found = self.at_least(severity)
        if found:
            first = next(finding for finding in found if finding.severity is self.worst)
            what = f"more {first.severity}" if len({finding.severity for finding in found}) == 1 else "more finding"
            more = f" (and {counted(len(found) - 1, what)})" if len(found) > 1 else ""
            raise FindingsFound(f"{first}{more}", hint=hint or first.hint, report=self)


def joined(reports: Iterable[Report]) -> Report:
    """Return one report with the contents of all `reports`, in their order and without duplicates."""
    listed, found = tuple(reports), dict[str, Any]()
    for name in Report.__struct_fields__:
        found[name] = tuple(chain.from_iterable(map(attrgetter(name), listed)))
        if name in _ONCE:
            found[name] = tuple(dict.fromkeys(found[name]))
    return Report(**found)


_ONCE = ("findings", "skipped", "ignored")
"""What several reports of one folder may have in common."""


def by_subject(report: Report) -> tuple[tuple[Checked, tuple[Finding, ...]], ...]:
    """Return each folder with its findings: those whose path lies in it, but not in a folder inside it.

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
        kept[checked.path] = replace(earlier or checked, rules=rules)
    return tuple((checked, tuple(found[path])) for path, checked in kept.items())


def refuse_errors(found: Iterable[Finding], ignored: tuple[str, ...]) -> tuple[Finding, ...]:
    """Return the findings if none of them is an error, or all errors are `ignored`, by the beginnings of their codes.
    Raises `FindingsFound` with the other errors.
    """
    kept = tuple(found)
    errors = tuple(f for f in kept if f.severity is Severity.ERROR and not (ignored and f.code.startswith(ignored)))
    if errors:
        codes = ",".join(sorted({error.code for error in errors}))
        Report(findings=errors).raise_at(Severity.ERROR, hint=f'to continue despite these errors: `ignore="{codes}"`')
    return kept
