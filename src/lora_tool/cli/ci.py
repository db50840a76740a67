"""`lora-tool ci`: whatever training left, validated, consolidated, merged, verified, and pushed if asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lora_tool.cli.command_table import Configured, configured
from lora_tool.cli.configuration import RuleChoice, rule_choice
from lora_tool.cli.exit_codes import DONE, FAILED_CHECK, FINDINGS, exit_code
from lora_tool.cli.options import (
    UserPath,
    config_option,
    json_option,
    pair_options,
    pairs_asked,
    quiet_option,
    rank_file_options,
    report_option,
    verbose_option,
)
from lora_tool.cli.push import pushed_to, repository, repository_options
from lora_tool.cli.reporting import SUMMARY, ReportFile, report_files, report_text
from lora_tool.cli.terminal import progress_bar, say, wants_colour
from lora_tool.cli.writing import asked, merge_options
from lora_tool.display import from_here, printable
from lora_tool.pipeline.model import Job, Outcome, Stage, Status
from lora_tool.plan.merge.options import MergeOptions
from lora_tool.report.findings import Severity
from lora_tool.report.forms import Form
from lora_tool.report.model import Ignored, Report, Unread, joined
from lora_tool.rules.engine.registry import RULES
from lora_tool.validation.validating import Criteria

_COLOURS = {
    Status.PASSED: "green",
    Status.REUSED: "green",
    Status.PLANNED: "cyan",
    Status.FAILED: "red",
    Status.SKIPPED: "bright_black",
}


@click.command(
    "ci", cls=Configured, epilog="Example: lora-tool ci my-run/ -o my-reward-model/ --rm --report junit=report.xml"
)
@click.argument("checkpoint", default=".", type=UserPath(), metavar="[CKPT]")
@merge_options(MergeOptions)
@pair_options
@rank_file_options
@click.option("--dry-run", is_flag=True, help="Validate and print what would be done, but write nothing.")
@click.option(
    "--push",
    type=repository,
    metavar="REPO",
    help="Repository to publish the result to: owner/name[@branch], hf:// or URL.",
)
@repository_options
@report_option
@config_option
@json_option
@quiet_option("Print only the summary.")
@verbose_option
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> int:  # noqa: ANN401 - click's options by name
    """Validate, consolidate, merge and verify the training output CKPT; report, and push if asked.

    CKPT is an adapter, a trainer, DeepSpeed or FSDP checkpoint, or a run folder, whose best complete checkpoint is
    used. The command stops at the first stage that fails, and skips stages that an earlier run already proved. On
    GitHub Actions,
    annotations and the job summary are written automatically. Options can be set in the [ci] table of lora-tool.toml.
    """
    from lora_tool.pipeline.running import run  # noqa: PLC0415 - after the usage is known to be right

    options = ctx.params
    settings = configured(ctx)
    rules = rule_choice(ctx, settings)
    files = report_files(options["reports"], settings)
    job = _job(options, rules, files, settings.criteria)
    quiet = options["quiet"] or options["as_json"]
    outcome = run(
        job,
        on_stage=lambda stage: None if quiet else say(_line(stage)),
        on_plan=lambda plan: None if quiet else click.echo(printable(plan.notes[0]), err=True),
        watch=lambda what, nbytes: progress_bar(what, nbytes, quiet=quiet),
    )
    report = _report(outcome, job, rules.ignored)
    _write_reports(outcome, report, files, job)
    _set_github_output(outcome)
    if options["as_json"]:
        from lora_tool.pipeline.render import outcome_json  # noqa: PLC0415 - JSON's words, only where asked for

        click.echo(json.dumps(outcome_json(outcome, report), indent=2, allow_nan=False))
    else:
        failed = [_line(stage) for stage in outcome.stages if quiet and stage.status is Status.FAILED]
        say("\n".join([*failed, *_summary(outcome, report)]))
    return _exit_code(outcome)


def _job(options: Mapping[str, Any], rules: RuleChoice, files: tuple[ReportFile, ...], criteria: Criteria) -> Job:
    checkpoint: Path = options["checkpoint"]
    real = Path(os.path.realpath(checkpoint))
    repo, branch = pushed_to(options["push"] or (None, None), "--push", options["revision"])
    merging = replace(asked(MergeOptions, options), **rules.arguments())
    return Job(
        checkpoint=checkpoint,
        output=Path(merging.out) if merging.out else from_here(real.with_name(f"{real.name}-merged")),
        options=merging,
        deep=criteria.deep,
        servers=criteria.servers,
        tag=options["tag"],
        pairs=pairs_asked(options["pairs"], options["min_accuracy"]),
        adapter_config=options["adapter_config"],
        lora_alpha=options["lora_alpha"],
        push=repo,
        private=options["private"],
        revision=branch,
        create_pr=options["create_pr"],
        dry_run=options["dry_run"],
        reports=tuple(file.path for file in files),
    )


def _report(outcome: Outcome, job: Job, ignored: tuple[Ignored, ...]) -> Report:
    """Return the findings of all stages; an error of another sort stands in it as a folder that could not be read."""
    found = joined(stage.report for stage in outcome.stages if stage.report is not None)
    unread: tuple[Unread, ...] = ()
    if outcome.error is not None and not found.at_least(job.fail_on):
        failed = next(stage.name for stage in outcome.stages if stage.error is not None)
        unread = (Unread(path=str(job.checkpoint), message=str(outcome.error), hint=outcome.error.hint, during=failed),)
    return joined([found, Report(unread=unread, ignored=ignored)])


def _write_reports(outcome: Outcome, report: Report, files: tuple[ReportFile, ...], job: Job) -> None:
    if os.environ.get("GITHUB_ACTIONS") == "true":
        annotations = _rendered(outcome, report, Form.GITHUB, job)
        if annotations:
            click.echo(annotations, err=True)  # the runner reads both streams, and stdout may be JSON
        summary = os.environ.get(SUMMARY)
        if summary and all(file.path != Path(summary) for file in files):
            files = (*files, ReportFile(form=Form.MARKDOWN, path=Path(summary)))
    for file in files:
        file.write(_rendered(outcome, report, file.form, job))


def _set_github_output(outcome: Outcome) -> None:
    """Set the step's output `output`, where a GitHub Actions runner waits for it."""
    path = os.environ.get("GITHUB_OUTPUT")
    output = str(outcome.output or "")
    if path and output == printable(output):  # a line break would set another output
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"output={output}\n")


def _rendered(outcome: Outcome, report: Report, form: Form, job: Job) -> str:
    if form is Form.MARKDOWN:
        from lora_tool.pipeline.render import outcome_markdown  # noqa: PLC0415

        return outcome_markdown(outcome, report, pages=RULES)
    return report_text(report, form, job.fail_on)


def _line(stage: Stage) -> str:
    status = f"{stage.status:<8}"
    shown = click.style(status, fg=_COLOURS[stage.status]) if wants_colour() else status
    took = f"  ({stage.seconds:.1f} s)" if stage.status is not Status.SKIPPED else ""
    return f"{shown}{stage.name:<12}{printable(stage.summary)}{took}"


def _summary(outcome: Outcome, report: Report) -> list[str]:
    from lora_tool.report.text import findings_lines, skipped_lines  # noqa: PLC0415

    lines = list(findings_lines(report.at_least(Severity.WARNING), color=wants_colour()))
    if outcome.error is not None and outcome.error.hint and not lines:
        lines.append(f"hint: {printable(outcome.error.hint)}")
    lines += [f"warning: {printable(warning)}" for stage in outcome.stages for warning in stage.warnings]
    lines += skipped_lines(report.skipped)
    if outcome.output is not None:
        return [*lines, f"passed: {printable(str(outcome.output))}"]
    return [*lines, "would pass: nothing was written" if outcome.passed else "failed"]


def _exit_code(outcome: Outcome) -> int:
    if outcome.error is not None:
        return exit_code(outcome.error)
    failed = next((stage.name for stage in outcome.stages if stage.status is Status.FAILED), None)
    return DONE if failed is None else FAILED_CHECK if failed == "verify" else FINDINGS
