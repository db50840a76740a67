"""A pipeline run in the forms of programs: JSON, and Markdown for a job summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_tool.display import printable
from lora_tool.pipeline.model import Outcome, Stage, Status
from lora_tool.report.json import report_json
from lora_tool.report.markdown import code, report_markdown, text
from lora_tool.report.model import Page, Report

_MARKS = {Status.PASSED: "✅", Status.REUSED: "✅ as proven before", Status.FAILED: "❌", Status.SKIPPED: "–"}


def outcome_json(outcome: Outcome, report: Report) -> dict[str, Any]:
    """Return the run as JSON data; `report` has the findings of all its stages. `outcome_schema` describes it."""
    return {
        "schema_version": 1,
        "passed": outcome.passed,
        "output": printable(str(outcome.output)) if outcome.output else None,
        "stages": [
            {
                "name": stage.name,
                "status": str(stage.status),
                "summary": printable(stage.summary),
                "warnings": [printable(warning) for warning in stage.warnings],
                "seconds": round(stage.seconds, 3),
                "hint": printable(stage.error.hint) if stage.error and stage.error.hint else None,
            }
            for stage in outcome.stages
        ],
        "report": report_json(report),
    }


def outcome_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `outcome_json`'s form; its `report` is described by the report's own."""
    parsed: dict[str, Any] = json.loads(Path(__file__).with_name("ci.schema.json").read_text(encoding="utf-8"))
    return parsed


def outcome_markdown(outcome: Outcome, report: Report, *, pages: Mapping[str, Page]) -> str:
    """Return the run as Markdown: a line per stage, then what was found."""
    # what stopped a stage stands in its line
    return report_markdown(replace(report, unread=()), pages=pages, heading=tuple(_heading(outcome)))


def _heading(outcome: Outcome) -> Iterator[str]:
    result = f"passed: {code(str(outcome.output))}" if outcome.output else "failed"
    yield f"### {'✅' if outcome.passed else '❌'} lora-tool ci {result}"
    yield from ("", "| | stage | |", "|---|---|---|")
    for stage in outcome.stages:
        yield f"| {_MARKS[stage.status]} | {stage.name} | {_cell(stage)} |"


def _cell(stage: Stage) -> str:
    took = f" ({stage.seconds:.1f} s)" if stage.status is not Status.SKIPPED else ""
    hint = f"<br>hint: {text(stage.error.hint)}" if stage.error and stage.error.hint else ""
    warnings = "".join(f"<br>⚠️ {text(warning)}" for warning in stage.warnings)
    return f"{text(stage.summary)}{took}{warnings}{hint}"
