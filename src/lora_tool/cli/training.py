"""A whole run as `lora-tool train` does it: judged, launched, reported, and carried on."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from lora_tool.cli.after_training import after_command, carry_on, foreseen
from lora_tool.cli.terminal import tell
from lora_tool.display import counted, printable
from lora_tool.errors import ExecutionError
from lora_tool.execution.folder import replace_file
from lora_tool.formats.adapter_config import FILE_NAME as ADAPTER_CONFIG
from lora_tool.formats.files import is_file
from lora_tool.report import Finding, Report, Severity
from lora_tool.report.json import report_json
from lora_tool.train.checks import require_inputs, static_findings, with_settings
from lora_tool.train.config import RunConfig, read_run_config, require_training
from lora_tool.train.job import TrainingOutcome, TrainingStatus, json_value
from lora_tool.train.launch import launch, launch_command, require_good
from lora_tool.train.methods import Method
from lora_tool.train.remains import ResumeChoice, is_empty, last_valid, named, newest_rank_files, reassemble

REPORT = "train_report.json"
_SECRET = ("_token", "_key", "_secret")
"""How the names of options end whose values are not shown."""


def train(
    method: Method,
    options: tuple[str, ...],
    config: Path | None,
    *,
    dry_run: str | None,
    resume: str | None,
    as_json: bool,
    quiet: bool,
) -> int | None:
    """Do what `lora-tool train` was asked for and return the exit code of what ran after it, None if nothing did."""
    require_training()
    run, settings = with_settings(read_run_config(method, config, options))
    require_inputs(run)
    after = [item for item in foreseen(run, run.output) if item.code not in run.guard.ignore]
    run, choice = _resume(run, resume)
    for name, (value, why) in settings.items():
        click.echo(f"set {name}: {str(value).lower() if isinstance(value, bool) else value} ({why})", err=True)
    found = (*choice.skipped, *after, *(static_findings(run) if run.guard.mode != "off" else ()))
    _show(found)
    if choice.path is not None:
        click.echo(f"resuming from {printable(str(choice.path))}", err=True)
    outcome = _outcome(run, choice, found, dry_run=dry_run)
    report = _report(run, {name: value for name, (value, _) in settings.items()}, outcome)
    if not dry_run:
        # the cause of a failure is told, and not that there is no room for its report either
        with contextlib.suppress(*((ExecutionError,) if outcome.status is TrainingStatus.FAILED else ())):
            _write_report(report, run.output)
    if as_json:
        click.echo(json.dumps(report, indent=2, default=str))
    elif dry_run == "static":
        _print_plan(run)
    outcome = _rescued(run, outcome)
    require_good(outcome)
    if not (as_json or quiet or dry_run == "static"):
        _summarise(run, outcome)
    output = Path(str(outcome.facts.get("output", run.output)))
    if dry_run or not after_command(run, output):
        return None
    # with --json, stdout is the report's alone
    return carry_on(run, output, stdout=sys.stderr.fileno() if as_json else None)


def _outcome(
    run: RunConfig, choice: ResumeChoice, found: tuple[Finding, ...], *, dry_run: str | None
) -> TrainingOutcome:
    """Return how it ended: refused here, or what the workers say."""
    if run.guard.mode == "stop" and any(item.severity is Severity.ERROR for item in found):
        return TrainingOutcome(status=TrainingStatus.REFUSED, findings=found)
    if dry_run == "static":
        return TrainingOutcome(status=TrainingStatus.CHECKED, findings=found)
    new = [folder for folder in (run.output, *run.output.parents) if not folder.exists()]
    outcome = launch(run, dry_run=dry_run is not None, resume=choice.path, reported=[item.code for item in found])
    with contextlib.suppress(OSError):
        for folder in new if dry_run else ():
            folder.rmdir()  # transformers makes it before anything is written there
    return replace(outcome, findings=(*found, *outcome.findings))


def _resume(run: RunConfig, resume: str | None) -> tuple[RunConfig, ResumeChoice]:
    """Return the run, and the checkpoint that it resumes from: what was typed, else TRL's own ``resume_from_checkpoint``."""
    asked = resume or run.text("resume_from_checkpoint") or "false"
    if asked.lower() == "false":
        return run, ResumeChoice()
    choice = last_valid(run.output) if asked.lower() in ("auto", "true") else named(Path(asked))
    if choice.path is None:
        click.echo(f"found no checkpoint to resume from in {printable(str(run.output))}: starting at step 0", err=True)
    return replace(run, resuming=choice.path is not None), choice


def _show(found: Iterable[Finding]) -> None:
    for item in found:
        subject = f"{item.subject} " if item.subject else ""
        tell(str(item.severity), f"{item.code}: {item.path}: {subject}{item.message}")
        if item.hint:
            tell("  hint", item.hint)


def _print_plan(run: RunConfig) -> None:
    import yaml  # only where a run is read

    click.echo(f"# {shlex.join(launch_command(run))}")
    given = {name: getattr(value, "value", value) for name, value in run.options.items() if name in run.given}
    shown = {name: "***" if name.endswith(_SECRET) else value for name, value in given.items()}
    click.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip())


def _report(run: RunConfig, settings: dict[str, Any], outcome: TrainingOutcome) -> dict[str, Any]:
    """Return the report of a run, which ``--json`` prints and the run's folder keeps."""
    return {
        **report_json(Report(findings=outcome.findings)),
        "method": run.method.name,
        "status": outcome.status.value,
        "output": outcome.facts.get("output"),
        "settings": settings,
        "notes": list(outcome.notes),
        "facts": json_value(outcome.facts),
        "error": outcome.error,
        "hint": outcome.hint,
    }


def _write_report(report: dict[str, Any], output: Path) -> None:
    """Leave the report in the run's folder, where it was begun; no path of this machine in it, for it may be pushed."""
    if output.is_dir():
        findings = [{**item, "path": Path(item["path"]).name} for item in report["findings"]]
        place = {"output": "." if report["output"] == str(output) else None}
        table = {**report, **place, "findings": findings, "facts": {**report["facts"], **place}}
        replace_file(output / REPORT, f"{json.dumps(table, indent=2, default=str)}\n".encode())


def _summarise(run: RunConfig, outcome: TrainingOutcome) -> None:
    facts = outcome.facts
    warnings = sum(item.severity is Severity.WARNING for item in outcome.findings)
    seen = counted(warnings, "warning") if warnings else "no findings"
    if outcome.status is TrainingStatus.CHECKED:
        click.echo(f"{run.method.name}: ready to train, {seen}")
        return
    metrics = facts.get("metrics", {})
    seconds, loss = metrics.get("train_runtime"), metrics.get("train_loss")
    click.echo(
        f"trained {run.method.name}: {facts.get('steps')} steps"
        + (f" in {seconds:.0f} s" if seconds is not None else "")
        + (f", mean loss {loss:.4g}" if loss is not None else "")
        + (f", parameters moved by {facts['moved']:.3g}" if facts.get("moved") is not None else "")
        + f", {seen}"
    )
    head = f" with its head {facts['head']} ({counted(facts['num_labels'], 'label')})" if facts.get("head") else ""
    output = Path(str(facts.get("output")))
    click.echo(f"wrote {printable(str(output))}{head}; the report is {REPORT} in it")
    if not after_command(run, output) and is_file(output / ADAPTER_CONFIG):
        click.echo(f"next: lora-tool merge {printable(shlex.quote(str(output)))}")


def _rescued(run: RunConfig, outcome: TrainingOutcome) -> TrainingOutcome:
    """Return the outcome with an adapter without values reassembled from the rank files, where that was requested."""
    empty = run.after.consolidate and outcome.status is TrainingStatus.BAD_RESULT and is_empty(outcome.findings)
    checkpoint, out = newest_rank_files(run.output) if empty else None, run.output / "consolidated"
    if checkpoint is None or not reassemble(checkpoint, out):
        return outcome
    click.echo(f"reassembled the adapter from the rank files of {printable(str(checkpoint))}", err=True)
    return replace(outcome, status=TrainingStatus.DONE, facts={**outcome.facts, "output": str(out)})
