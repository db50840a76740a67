"""A pipeline run, or several, in the forms of programs: JSON, and Markdown for a job summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict, replace

from lora_tool.core.display import printable
from lora_tool.core.report.markdown import code, report_markdown, text
from lora_tool.core.report.model import Page, Report
from lora_tool.workflows.ci.model import Outcome, Stage, Status, Swept, best_first, best_of, in_order

_MARKS = {Status.PASSED: "✅", Status.REUSED: "✅ as proven before", Status.FAILED: "❌", Status.SKIPPED: "–"}


def outcome_json(outcome: Outcome, report: Report) -> dict[str, Any]:
    """Return the run as JSON data; `report` has the findings of all its stages. `ci.schema.json` describes it."""
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
        "report": report.to_json(),
    }


def outcome_markdown(outcome: Outcome, report: Report, *, pages: Mapping[str, Page]) -> str:
    """Return the run as Markdown: a line per stage, then what was found."""
    # what stopped a stage stands in its line
    return report_markdown(replace(report, unread=()), pages=pages, heading=tuple(_heading(outcome)))


def sweep_json(swept: Sequence[Swept], reports: Sequence[Report], codes: Sequence[int]) -> dict[str, Any]:
    """Return several runs as JSON data, with the report and the exit code of each. `ci-each.schema.json` describes it."""
    best = best_of(swept)
    return {
        "schema_version": 1,
        "passed": all(each.outcome.passed for each in swept),
        "best": None if best is None else printable(best.name),
        "ranking": [printable(each.name) for each in best_first(swept)],
        "runs": [
            {
                "name": printable(each.name),
                "checkpoint": printable(str(each.job.checkpoint)),
                "exit_code": code,
                "pairs": None if each.outcome.ranking is None else asdict(each.outcome.ranking),
                "outcome": outcome_json(each.outcome, report),
            }
            for each, report, code in zip(swept, reports, codes, strict=True)
        ],
    }


def sweep_markdown(swept: Sequence[Swept], report: Report, *, pages: Mapping[str, Page]) -> str:
    """Return several runs as Markdown: a line for each, the best first, then what was found."""
    return report_markdown(replace(report, unread=()), pages=pages, heading=tuple(_sweep_heading(swept)))


def _sweep_heading(swept: Sequence[Swept]) -> Iterator[str]:
    passed = sum(each.outcome.passed for each in swept)
    yield f"### {'✅' if passed == len(swept) else '❌'} lora-tool ci --each: {passed} of {len(swept)} passed"
    yield from ("", "| | name | pairs right | mean margin | |", "|---|---|--:|--:|---|")
    for each in in_order(swept):
        failed, ranking = each.outcome.failed, each.outcome.ranking
        accuracy, margin = ("", "") if ranking is None else ranking.cells
        why = "" if failed is None else f"{failed.name}: {_cell(failed)}"
        yield f"| {'✅' if failed is None else '❌'} | {code(each.name)} | {accuracy} | {margin} | {why} |"


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
