"""Reading back what was written, before it is published under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lora_tool.plan.core.plan import Plan


class ReadBack:
    """The check of a written folder, for `execute`. It shows its findings, and keeps its summary for the result."""

    def __init__(self, plan: Plan, out: Path, *, jobs: int | None) -> None:
        self._plan = plan
        self._out = out
        self._jobs = jobs
        self.summary: Mapping[str, Any] = {}
        """What the manifest records."""

    def __call__(self, folder: Path) -> Mapping[str, Any]:
        """Return the summary. Raises `VerificationFailed` where the folder is not what the plan says."""
        from lora_tool.report.text import findings_lines  # noqa: PLC0415 - numpy is loaded by now
        from lora_tool.verification.verifying import check_written, summary_json  # noqa: PLC0415

        found = check_written(self._plan, folder, jobs=self._jobs)
        # under the name that the user knows; the folder does not have it yet
        named = tuple(
            replace(finding, path=finding.path.replace(str(folder), str(self._out), 1))
            for finding in found.report.findings
        )
        found = replace(found, report=replace(found.report, findings=named))
        for line in findings_lines(named):
            click.echo(line, err=True)
        found.raise_for_errors()
        self.summary = summary_json(found)
        return self.summary

    @property
    def line(self) -> str:
        """The summary in a line."""
        found = self.summary
        unknown = f", {len(found['not_recomputed'])} not recomputed" if found["not_recomputed"] else ""
        ulps = found["largest_ulps"]
        farthest = "" if ulps is None else f", at most {ulps:.2f} units in the last place off"
        return f"verified on samples read back: {found['right']} of {found['tensors']} tensors right{farthest}{unknown}"
