"""How a guarded training ended, for both commands: as an error, and as JSON data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
from msgspec import Struct

from lora_tool.cli.exit_codes import exit_code
from lora_tool.cli.terminal import show_error
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report import Finding, Report, Severity
from lora_tool.core.report.json import report_json
from lora_tool_train.errors import TrainingFailed, TrainingStopped
from lora_tool_train.job import TrainingOutcome, TrainingStatus
from lora_tool_train.remains import Saved


class Ended(Struct, frozen=True, kw_only=True):
    """How a training ended: refused before it began, or with an exit code, its processes' outcomes and its results."""

    refused: Finding | None = None
    """The error for which it did not start."""
    before: tuple[Finding, ...] = ()
    """Findings about its configuration."""
    code: int = 0
    outcomes: Sequence[TrainingOutcome] = ()
    saved: Sequence[Saved] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, once: every process of a training has the same."""
        seen = (*self.before, *(found for outcome in self.outcomes for found in outcome.findings), *self.errors)
        return tuple(dict.fromkeys(seen))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(error for item in self.saved for error in item.errors)

    @property
    def status(self) -> str:
        """One word for it, for programs."""
        if self.refused:
            return "refused"
        if self.errors:
            return "bad-result"
        return str(self.outcomes[0].status) if self.outcomes else "unguarded"

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.outcomes[0].facts) if self.outcomes else {}

    @property
    def first_machine(self) -> bool:
        """Whether the process that saves ran on this machine."""
        return not self.facts.get("rank")

    def error(self) -> LoraToolError | None:
        """Return the error that the training ended with, None if it ended well."""
        if self.refused:
            found = self.refused
            return TrainingStopped(f"training did not start: {found.code}: {found.message}", hint=found.hint)
        first = self.outcomes[0] if self.outcomes else None
        if first is not None and first.status is TrainingStatus.STOPPED:
            return TrainingStopped(f"lora-tool stopped the training: {first.error}", hint=first.hint)
        if first is not None and first.status is TrainingStatus.FAILED:
            return TrainingFailed(first.error or "training failed", hint=first.hint)
        if self.errors:
            return TrainingStopped(f"the result is bad: {self.errors[0]}", hint=self.errors[0].hint)
        return None

    def show(self, *, as_json: bool, **more: Any) -> int:
        """Print the report, with `more` keys in it, where it is wanted as JSON; print the error; return the exit code."""
        error = self.error()
        if as_json:
            ending = {"error": str(error), "hint": error.hint} if error else {"error": None, "hint": None}
            table = {
                **report_json(Report(findings=self.findings)),
                "status": self.status,
                "results": [str(item.path) for item in self.saved],
                "facts": self.facts,
                **ending,
                **more,
            }
            click.echo(json.dumps(table, indent=2, default=str))
        if error is None:
            return 0
        if self.outcomes:
            click.echo(err=True)  # it may have ended within the line of a progress bar
        show_error(error)
        return exit_code(error)

    def counts(self) -> str:
        """Return how many warnings there were, in words."""
        warnings = sum(item.severity is Severity.WARNING for item in self.findings)
        return f"{warnings} warning{'s' * (warnings > 1)}" if warnings else "no findings"
