"""`lora-tool ci`: whatever training left, validated, consolidated, merged, verified, and pushed if asked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from lora_tool.checkpoints.sources import beside, unfetched
from lora_tool.cli.ci_view import code_of, report_lines, report_of, set_github_output, stage_line, write_reports
from lora_tool.cli.configuration import Configuration, Configured, RuleChoice, configured, rule_choice
from lora_tool.cli.options import (
    FolderOrId,
    config_option,
    json_option,
    option_in,
    options_of,
    quiet_option,
    report_option,
    reward_option,
    strict_option,
    typed_as,
    typed_task,
    verbose_option,
)
from lora_tool.cli.push import pushed_to, repository
from lora_tool.cli.reporting import ReportFile, report_files, report_text
from lora_tool.cli.terminal import progress_bar, say
from lora_tool.core.display import printable
from lora_tool.core.options import Section
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form
from lora_tool.core.report.model import Report
from lora_tool.hub.options import BranchOptions
from lora_tool.plans.consolidate.plan_consolidate import RankFileOptions
from lora_tool.plans.merge.options import MergeOptions
from lora_tool.rules.engine.registry import RULES
from lora_tool.workflows.ci.model import CiOptions, Job, Outcome, Status
from lora_tool.workflows.verify import PairOptions, read_given_pairs
from lora_tool.workflows.written import loading


@click.command(
    "ci", cls=Configured, epilog="Example: lora-tool ci my-run/ -o my-reward-model/ --rm --report junit=report.xml"
)
@click.argument("checkpoint", default=".", type=FolderOrId(), metavar="[CKPT]")
@options_of(MergeOptions)
@reward_option
@option_in(
    Section.INPUT,
    "--each",
    is_flag=True,
    help="Run on every adapter under CKPT and every checkpoint of a run, each into OUTPUT/NAME; --pairs ranks them.",
)
@options_of(PairOptions)
@options_of(RankFileOptions)
@strict_option
@click.option("--dry-run", is_flag=True, help="Validate and print what would be done, but write nothing.")
@option_in(
    Section.HUB,
    "--push",
    type=repository,
    metavar="REPO",
    help="Repository to publish the result to: owner/name[@branch], hf:// or URL.",
)
@options_of(BranchOptions)
@report_option
@config_option
@json_option
@quiet_option("Print only the summary.")
@verbose_option
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> int:
    """Validate, consolidate, merge and verify the training output CKPT; report, and push if asked.

    CKPT is an adapter, here or on the Hub, a trainer, DeepSpeed or FSDP checkpoint, or a run folder, whose best complete
    checkpoint is used. The command stops at the first stage that fails, and skips stages that an earlier run already proved. With
    --each, CKPT is a folder of a sweep: one checkpoint that fails does not stop the others, and the exit code is the
    largest of all. On GitHub Actions, annotations and the job summary are written automatically. Options can be set in
    the [ci] table of lora-tool.toml.
    """
    options = ctx.params
    settings = configured(ctx)
    rules = rule_choice(ctx, settings)
    files = report_files(options["reports"], settings)
    job = _job(options, rules, files, settings)
    if options["each"]:
        if options["push"] is not None:
            one = "push the one that you choose with `lora-tool push`"
            raise click.UsageError(f"--push publishes one model, and --each makes several: {one}")
        from lora_tool.cli.ci_each import run_all  # only where asked for

        return run_all(job, files, rules.ignored, as_json=options["as_json"], quiet=options["quiet"])
    from lora_tool.workflows.ci.running import ci  # after the usage is known to be right

    quiet = options["quiet"] or options["as_json"]
    outcome = ci(
        job,
        on_stage=lambda stage: None if quiet else say(stage_line(stage)),
        on_plan=lambda plan: None if quiet else click.echo(printable(plan.notes[0]), err=True),
        watch=partial(progress_bar, quiet=quiet),
    )
    report = report_of(outcome, job, rules.ignored)
    write_reports(files, lambda form: _rendered(outcome, report, form, job))
    set_github_output(output=outcome.output)
    if options["as_json"]:
        from lora_tool.workflows.ci.render import outcome_json  # JSON's words, only when requested

        click.echo(json.dumps(outcome_json(outcome, report), indent=2, allow_nan=False))
    else:
        failed = [stage_line(stage) for stage in outcome.stages if quiet and stage.status is Status.FAILED]
        say("\n".join([*failed, *_summary(outcome, report, job)]))
    return code_of(outcome)


def _job(typed: Mapping[str, Any], rules: RuleChoice, files: tuple[ReportFile, ...], settings: Configuration) -> Job:
    repo, branch = pushed_to(typed["push"] or (None, None), "--push", typed["revision"])
    strict, criteria = typed["strict"] or bool(settings.strict), settings.criteria
    judged = rules.arguments() | ({"fail_on": Severity.WARNING} if strict else {})
    options = typed_as(
        CiOptions,
        typed,
        push=repo,
        revision=branch,
        dry_run=typed["dry_run"],
        strict=strict,
        deep=True if strict else criteria.deep,
        servers=criteria.servers,
        reports=tuple(file.path for file in files),
        **typed_task(typed),
        **judged,
    )
    found = unfetched(typed["checkpoint"])
    output = Path(options.out) if options.out else beside(found, "merged")
    return Job(
        checkpoint=found.path if found.hub_id is None else found.reference,
        output=output,
        options=options,
        pairs=read_given_pairs(options),
    )


def _rendered(outcome: Outcome, report: Report, form: Form, job: Job) -> str:
    if form is Form.MARKDOWN:
        from lora_tool.workflows.ci.render import outcome_markdown

        return outcome_markdown(outcome, report, pages=RULES)
    return report_text(report, form, job.fail_on)


def _summary(outcome: Outcome, report: Report, job: Job) -> list[str]:
    hint = None if outcome.error is None else outcome.error.hint
    lines = report_lines(report, (warning for stage in outcome.stages for warning in stage.warnings), hint)
    if outcome.output is not None:
        out, repo = str(outcome.output), job.options.push
        after = (
            f"lora-tool push {printable(shlex.quote(out))} OWNER/NAME"
            if repo is None
            else loading(repo, outcome.output)
        )
        return [*lines, f"passed: {printable(out)}", *([f"next: {after}"] if after else ())]
    return [*lines, "would pass: nothing was written" if outcome.passed else "failed"]
