"""`lora-tool ci --each`: every adapter and checkpoint under a folder on its own, with one table at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

import click

from lora_tool.cli.ci_view import code_of, report_lines, report_of, set_github_output, stage_line, write_reports
from lora_tool.cli.reporting import ReportFile, report_text
from lora_tool.cli.terminal import progress_bar, say, tell
from lora_tool.core.display import as_cell, counted, duration, printable
from lora_tool.core.report.forms import Form
from lora_tool.core.report.model import Ignored, Report, joined
from lora_tool.rules.engine.registry import RULES
from lora_tool.workflows.ci.model import Job, Stage, Status, Swept, best_of, in_order
from lora_tool.workflows.ci.running import ci_each


def run_all(
    job: Job, files: tuple[ReportFile, ...], ignored: tuple[Ignored, ...], *, as_json: bool, quiet: bool
) -> int:
    """Run the pipeline of every checkpoint under that of `job`, and report; return the largest of their exit codes.

    Raises as `ci_each` does.
    """
    silent = quiet or as_json
    swept = ci_each(
        job,
        left_out=lambda folder, what: None if silent else tell("left out", f"{folder}, {what}"),
        on_stage=lambda one, stage: None if silent else _say(one, stage),
        on_plan=lambda plan: None if silent else click.echo(printable(plan.notes[0]), err=True),
        watch=partial(progress_bar, quiet=silent),
    )
    reports = [report_of(each.outcome, each.job, ignored) for each in swept]
    codes = [code_of(each.outcome) for each in swept]
    report = joined(reports)
    write_reports(files, lambda form: _rendered(swept, report, form))
    best = best_of(swept)
    passed = all(each.outcome.passed for each in swept)
    set_github_output(
        output=job.output if passed and not job.options.dry_run else None, best=best.job.output if best else None
    )
    if as_json:
        from lora_tool.workflows.ci.render import sweep_json  # JSON's words, only where asked for

        click.echo(json.dumps(sweep_json(swept, reports, codes), indent=2, allow_nan=False))
    else:
        _show(swept, report, job)
    return max(codes)


def _say(job: Job, stage: Stage) -> None:
    if stage.status is not Status.SKIPPED:
        say(f"{printable(job.output.name)}: {stage_line(stage)}")


def _rendered(swept: Sequence[Swept], report: Report, form: Form) -> str:
    if form is Form.MARKDOWN:
        from lora_tool.workflows.ci.render import sweep_markdown

        return sweep_markdown(swept, report, pages=RULES)
    return report_text(report, form, swept[0].job.fail_on)


def _show(swept: Sequence[Swept], report: Report, job: Job) -> None:
    from lora_tool.cli.tables import show_table  # rich, only where it is shown

    warnings = dict.fromkeys(warning for each in swept for stage in each.outcome.stages for warning in stage.warnings)
    if lines := report_lines(report, warnings):
        say("\n".join(lines))
    columns = ("name", "verdict", "time>", "pairs right>", "mean margin>", "why not")
    show_table(columns, map(_row, in_order(swept)))
    passed = sum(each.outcome.passed for each in swept)
    would = "would pass, nothing was written" if job.options.dry_run else "passed"
    say(f"{passed} of {counted(len(swept), 'checkpoint')} {would}: {printable(str(job.output))}")
    best = best_of(swept)
    if best is not None:
        say(f"best: {printable(str(best.outcome.output))}")


def _row(each: Swept) -> Iterator[str]:
    outcome, failed = each.outcome, each.outcome.failed
    yield each.name
    yield "passed" if failed is None else f"{failed.name} failed"
    yield duration(sum(stage.seconds for stage in outcome.stages))
    yield from ("", "") if outcome.ranking is None else outcome.ranking.cells
    yield "" if failed is None else as_cell(_reason(failed))


def _reason(failed: Stage) -> str:
    """Return what stopped a run, in a few words."""
    found = failed.report.findings if failed.report is not None else ()
    return str(found[0]) if found and failed.error is None else failed.summary
