"""Asking the rules about a folder, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_tool.checkpoints import open_checkpoint, open_model
from lora_tool.core.report import Report, Severity
from lora_tool.verification.validating import validate


def judge(folder: Path, *, base: Path | None = None, **options: Any) -> Report:
    return validate(open_checkpoint(folder), base=None if base is None else open_model(base), **options)


def codes(report: Report, level: Severity = Severity.WARNING) -> set[str]:
    """Return the codes of the findings that are as bad as `level` or worse."""
    return {finding.code for finding in report.at_least(level)}


def lines(report: Report, level: Severity = Severity.WARNING) -> list[str]:
    return [f"{finding.severity} {finding}" for finding in report.at_least(level)]
