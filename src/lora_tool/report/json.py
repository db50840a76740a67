"""A report as JSON data: the stable form for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_tool.display import finite, printable
from lora_tool.report.findings import Finding, Severity
from lora_tool.report.model import Report, Run, RunCheckpoint
from lora_tool.version import __version__

SCHEMA_VERSION = 1
"""Rises when a field is renamed, removed or changes its meaning; new fields do not raise it."""


def report_json(report: Report) -> dict[str, Any]:
    """Return the whole report as JSON data. Names from files are escaped as in the text form."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "subjects": [
            {"path": printable(subject.path), "kind": subject.kind, "rules": list(subject.rules)}
            for subject in report.subjects
        ],
        "findings": [finding_json(finding) for finding in report.findings],
        "skipped": [
            {"code": skipped.code, "path": printable(skipped.path), "reason": printable(skipped.reason)}
            for skipped in report.skipped
        ],
        "ignored": [
            {"code": ignored.code, "reason": None if ignored.reason is None else printable(ignored.reason)}
            for ignored in report.ignored
        ],
        "unread": [
            {
                "path": printable(unread.path),
                "message": printable(unread.message),
                "hint": None if unread.hint is None else printable(unread.hint),
            }
            for unread in report.unread
        ],
        "runs": [_run(run) for run in report.runs],
        "summary": {
            "subjects": len(report.subjects),
            "errors": report.count(Severity.ERROR),
            "warnings": report.count(Severity.WARNING),
            "infos": report.count(Severity.INFO),
            "skipped": len(report.skipped),
            "unread": len(report.unread),
        },
    }


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `report_json`'s form, which this package carries."""
    parsed: dict[str, Any] = json.loads(Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8"))
    return parsed


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON data. Names from files are escaped as in the text form."""
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "path": printable(finding.path),
        "subject": None if finding.subject is None else printable(finding.subject),
        "message": printable(finding.message),
        "hint": None if finding.hint is None else printable(finding.hint),
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "path": printable(run.path),
        "metric": None if run.metric is None else printable(run.metric),
        "best": None if run.best is None else printable(run.best),
        "why_best": run.why_best,
        "checkpoints": [_checkpoint(row) for row in run.checkpoints],
    }


def _checkpoint(row: RunCheckpoint) -> dict[str, Any]:
    return {
        "path": printable(row.path),
        "name": printable(row.name),
        "step": row.step,
        "epoch": finite(row.epoch),
        "loss": finite(row.loss),
        "metric": finite(row.metric),
        "bytes": row.nbytes,
        "verdict": row.verdict,
        "errors": row.errors,
        "warnings": row.warnings,
        "codes": list(row.codes),
    }
