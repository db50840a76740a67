"""What one process sees of a training: kept for its outcome, and printed as it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from lora_tool.display import printable
from lora_tool.errors import TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.report.groups import by_rule
from lora_tool.train.config import GuardSettings
from lora_tool.train.job import TrainingOutcome, TrainingStatus


class Logbook:
    """What one process sees of a training: findings, notes and facts, printed as they come where it `prints`.

    `known` are codes of findings that the user has seen.
    """

    def __init__(self, settings: GuardSettings, *, known: Sequence[str] = (), prints: bool = True) -> None:
        self.settings = settings
        self.known = known
        self.prints = prints
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}
        self.stopped: TrainingStopped | None = None

    def report(self, findings: Iterable[Finding]) -> None:
        """Keep and print what is neither ignored nor known."""
        self._show(self._kept(findings))

    def judge(self, findings: Iterable[Finding]) -> None:
        """Report the findings. Raises `TrainingStopped` in mode `stop` where an error is among all that were reported.

        That error is not printed: the parent says it last, and once.
        """
        kept = self._kept(findings)
        error = next((found for found in self.findings if found.severity is Severity.ERROR), None)
        stops = error is not None and self.settings.mode == "stop"
        self._show([found for found in kept if not (stops and found is error)])
        if error is not None and stops:
            self.stopped = TrainingStopped(f"{error.code}: {error.message}", hint=error.hint)
            raise self.stopped

    def _kept(self, findings: Iterable[Finding]) -> list[Finding]:
        kept = [each for each in findings if each.code not in {*self.settings.ignore, *self.known}]
        self.findings += kept
        return kept

    def _show(self, findings: Sequence[Finding]) -> None:
        """Print the findings, the same ones counted: what is wrong with one tensor often is with hundreds."""
        for group in by_rule(findings):
            first, *others = group
            more = f" (and {len(others)} more like it)" if others else ""
            self._print(
                f"{first.severity}: {first.code}: {first.path + ': ' if first.path else ''}{first.message}{more}"
            )
            if first.hint:
                self._print(f"  hint: {first.hint}")

    def note(self, text: str) -> None:
        """Keep and print what is no finding."""
        self.notes.append(text)
        self._print(text)

    def outcome(self, status: TrainingStatus, **rest: Any) -> TrainingOutcome:
        """Return the outcome with all that was seen until now; `rest` are other fields of it."""
        return TrainingOutcome(status=status, findings=tuple(self.findings), notes=self.notes, facts=self.facts, **rest)

    def _print(self, text: str) -> None:
        if self.prints:
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()
