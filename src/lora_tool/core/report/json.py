"""A report as JSON data: the stable form for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tool.core.display import json_data
from lora_tool.core.report.findings import Finding, Severity
from lora_tool.core.version import __version__

if TYPE_CHECKING:
    from lora_tool.core.report.model import Report

SCHEMA_VERSION = 1
"""Rises when a field is renamed, removed or changes its meaning; new fields do not raise it."""
_COLUMNS = (
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
)


def report_json(report: Report) -> dict[str, Any]:
    """Return the whole report as JSON data. Names from files are escaped as in the text form."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "subjects": [_record(subject, "path", "kind", "rules") for subject in report.subjects],
        "findings": [finding_json(finding) for finding in report.findings],
        "skipped": [_record(skipped, "code", "path", "reason") for skipped in report.skipped],
        "ignored": [_record(ignored, "code", "reason") for ignored in report.ignored],
        "unread": [_record(unread, "path", "message", "hint") for unread in report.unread],
        "runs": [
            {
                **_record(run, "path", "metric", "best", "why_best"),
                "checkpoints": [{**_record(row, *_COLUMNS), "bytes": row.nbytes} for row in run.checkpoints],
            }
            for run in report.runs
        ],
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
    return _record(finding, "code", "severity", "path", "subject", "message", "hint")


def _record(item: object, *names: str) -> dict[str, Any]:
    return {name: json_data(getattr(item, name)) for name in names}
