"""Findings as JSON data: the stable form for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_tool.core.display import json_data
from lora_tool.core.report.findings import Finding

SCHEMA_VERSION = 1
"""Rises when a field is renamed, removed or changes its meaning; new fields do not raise it."""


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `Report.to_json`, which this package carries."""
    parsed: dict[str, Any] = json.loads(Path(__file__).with_name("report.schema.json").read_text(encoding="utf-8"))
    return parsed


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON data. Names from files are escaped as in the text form."""
    return record(finding, "code", "severity", "path", "subject", "message", "hint")


def record(item: object, *names: str) -> dict[str, Any]:
    """Return the fields `names` of a record as JSON data."""
    return {name: json_data(getattr(item, name)) for name in names}
