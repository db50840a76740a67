"""A report as JSON data: the stable form for programs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lora_tool.display import printable
from lora_tool.report.model import Finding, Report, Severity

SCHEMA_VERSION = 1
"""Rises when a field is renamed, removed or changes its meaning; new fields do not raise it."""


def report_json(report: Report) -> dict[str, Any]:
    """Return the whole report as JSON data. Names from files are escaped as in the text form."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": tool_version(),
        "subjects": [{"path": printable(subject.path), "kind": subject.kind} for subject in report.subjects],
        "findings": [_finding(finding) for finding in report.findings],
        "skipped": [
            {"code": skipped.code, "path": printable(skipped.path), "reason": printable(skipped.reason)}
            for skipped in report.skipped
        ],
        "summary": {
            "subjects": len(report.subjects),
            "errors": report.count(Severity.ERROR),
            "warnings": report.count(Severity.WARNING),
            "infos": report.count(Severity.INFO),
            "skipped": len(report.skipped),
        },
    }


def tool_version() -> str:
    """Return the installed version of lora-tool, "unknown" where only its source is there."""
    try:
        return version("lora-tool")
    except PackageNotFoundError:
        return "unknown"


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "path": printable(finding.path),
        "subject": None if finding.subject is None else printable(finding.subject),
        "message": printable(finding.message),
        "hint": None if finding.hint is None else printable(finding.hint),
    }
