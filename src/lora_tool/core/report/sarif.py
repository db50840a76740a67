"""A report as SARIF 2.1.0 (https://docs.oasis-open.org/sarif/sarif/v2.1.0/), for code scanning.

Paths inside the root are relative to it (`SRCROOT`), others absolute `file:` URIs; a tensor or a config field is a
logical location. Rules that could not run and paths that could not be read are notifications of the invocation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lora_tool.core.display import printable
from lora_tool.core.report.findings import Finding, Severity
from lora_tool.core.report.model import Page, Report
from lora_tool.core.report.text import relative_to
from lora_tool.core.version import __version__

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MOST_RESULTS = 20_000
"""GitHub refuses a file with more than 25,000."""

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def report_sarif(report: Report, *, pages: Mapping[str, Page], root: Path) -> dict[str, Any]:
    """Return the log as JSON data, with the rules that ran or found something."""
    codes = sorted(
        {code for checked in report.subjects for code in checked.rules}
        | {finding.code for finding in report.findings}
        | {skipped.code for skipped in report.skipped}
    )
    driver = {"name": "lora-tool", "version": __version__, "rules": [_rule(code, pages) for code in codes]}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [_invocation(report, root)],
                "columnKind": "unicodeCodePoints",
                "results": [_result(finding, codes, root) for finding in _worst(report.findings)],
            }
        ],
    }


def _worst(findings: Sequence[Finding]) -> Sequence[Finding]:
    """Return the findings in their order, the worst `MOST_RESULTS` of them where there are more."""
    if len(findings) <= MOST_RESULTS:
        return findings
    return sorted(findings, key=lambda finding: -finding.severity.weight)[:MOST_RESULTS]


def _rule(code: str, pages: Mapping[str, Page]) -> dict[str, Any]:
    page = pages.get(code)
    if page is None:
        return {"id": code}
    return {
        "id": code,
        "shortDescription": {"text": page.title},
        "fullDescription": {"text": page.title},
        "help": {"text": page.text, "markdown": page.text},
        "defaultConfiguration": {"level": _LEVELS[page.severity]},
    }


def _result(finding: Finding, codes: list[str], root: Path) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": _artifact(finding.path, root)}}
    if finding.subject:
        location["logicalLocations"] = [{"fullyQualifiedName": printable(finding.subject), "kind": "member"}]
    about = f"{printable(finding.subject)}: " if finding.subject else ""
    hint = f"\n{printable(finding.hint)}" if finding.hint else ""
    known_by = f"{finding.code}\0{relative_to(finding.path, root) or finding.path}\0{finding.subject}"
    return {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{about}{printable(finding.message)}{hint}"},
        "locations": [location],
        "partialFingerprints": {
            "loraTool/v1": hashlib.sha256(known_by.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        },
    }


def _artifact(path: str, root: Path) -> dict[str, str]:
    inside = relative_to(path, root)
    if inside is not None:
        return {"uri": _quoted(inside), "uriBaseId": "SRCROOT"}
    return {"uri": "file://" + _quoted(str(root / path))}


def _quoted(path: str) -> str:
    try:
        return quote(os.fsencode(path))
    except UnicodeEncodeError:  # no file has this name
        return quote(printable(path))


def _invocation(report: Report, root: Path) -> dict[str, Any]:
    skipped = [
        {
            "level": "note",
            "message": {"text": f"{item.code} could not run: {printable(item.reason)}"},
            "locations": [{"physicalLocation": {"artifactLocation": _artifact(item.path, root)}}],
            "associatedRule": {"id": item.code},
        }
        for item in report.skipped
    ]
    unread = [
        {
            "level": "error",
            "message": {"text": printable(item.message)},
            "locations": [{"physicalLocation": {"artifactLocation": _artifact(item.path, root)}}],
        }
        for item in report.unread
    ]
    left = len(report.findings) - MOST_RESULTS
    cut = [{"level": "warning", "message": {"text": f"{left:,} more findings omitted"}}] if left > 0 else []
    return {"executionSuccessful": not report.unread, "toolExecutionNotifications": [*unread, *cut, *skipped]}
