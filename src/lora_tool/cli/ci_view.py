"""How `lora-tool ci` shows a run: a line for a stage, its report, its exit code, and what GitHub Actions is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from lora_tool.cli.exit_codes import DONE, FAILED_CHECK, FINDINGS, exit_code
from lora_tool.cli.reporting import SUMMARY, ReportFile
from lora_tool.cli.terminal import as_typed, wants_colour
from lora_tool.core.display import printable
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form
from lora_tool.core.report.model import Ignored, Report, Unread, joined
from lora_tool.core.report.text import findings_lines, skipped_lines
from lora_tool.workflows.ci.model import Job, Outcome, Stage, Status

_COLOURS = {
    Status.PASSED: "green",
    Status.REUSED: "green",
    Status.PLANNED: "cyan",
    Status.FAILED: "red",
    Status.SKIPPED: "bright_black",
}


def stage_line(stage: Stage) -> str:
    """Return the stage as one line."""
    status = f"{stage.status:<8}"
    shown = click.style(status, fg=_COLOURS[stage.status]) if wants_colour() else status
    took = f"  ({stage.seconds:.1f} s)" if stage.status is not Status.SKIPPED else ""
    return f"{shown}{stage.name:<12}{printable(as_typed(stage.summary))}{took}"


def report_of(outcome: Outcome, job: Job, ignored: tuple[Ignored, ...]) -> Report:
    """Return the findings of all stages; an error of another sort stands in it as a folder that could not be read."""
    found = joined(stage.report for stage in outcome.stages if stage.report is not None)
    unread: tuple[Unread, ...] = ()
    if outcome.error is not None and not found.at_least(job.fail_on):
        failed = next(stage.name for stage in outcome.stages if stage.error is not None)
        unread = (Unread(path=str(job.checkpoint), message=str(outcome.error), hint=outcome.error.hint, during=failed),)
    return joined([found, Report(unread=unread, ignored=ignored)])


def code_of(outcome: Outcome) -> int:
    """Return the exit code of a run."""
    if outcome.error is not None:
        return exit_code(outcome.error)
    failed = outcome.failed
    return DONE if failed is None else FAILED_CHECK if failed.name == "verify" else FINDINGS


def report_lines(report: Report, warnings: Iterable[str], hint: str | None = None) -> list[str]:
    """Return what is to be said of a report: its findings, else a `hint`, then `warnings`, and rules that could not run."""
    lines = list(findings_lines(report.at_least(Severity.WARNING), color=wants_colour()))
    lines += [f"hint: {printable(as_typed(hint))}"] if hint and not lines else []
    return [*lines, *(f"warning: {printable(warning)}" for warning in warnings), *skipped_lines(report.skipped)]


def write_reports(files: tuple[ReportFile, ...], rendered: Callable[[Form], str]) -> None:
    """Write the report files, and on GitHub Actions the annotations and the job summary. Raises `LoraToolError`."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        annotations = rendered(Form.GITHUB)
        if annotations:
            click.echo(annotations, err=True)  # the runner reads both streams, and stdout may be JSON
        summary = os.environ.get(SUMMARY)
        if summary and all(file.path != Path(summary) for file in files):
            files = (*files, ReportFile(form=Form.MARKDOWN, path=Path(summary)))
    for file in files:
        file.write(rendered(file.form))


def set_github_output(**outputs: Path | None) -> None:
    """Set outputs of the step, where a GitHub Actions runner waits for them; None is an empty one."""
    if path := os.environ.get("GITHUB_OUTPUT"):
        with Path(path).open("a", encoding="utf-8") as file:
            for name, value in outputs.items():
                said = "" if value is None else str(value)
                if said == printable(said):  # a line break would set another output
                    file.write(f"{name}={said}\n")
