"""`lora-tool train`: TRL's training, with guards."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tool.cli.options import UserPath, json_option, quiet_option
from lora_tool.cli.terminal import tell
from lora_tool.display import counted, printable
from lora_tool.train.methods import METHODS

if TYPE_CHECKING:
    from lora_tool.train.checks import Setting
    from lora_tool.train.config import RunConfig
    from lora_tool.train.job import TrainingOutcome
    from lora_tool.train.resume import ResumeChoice

REPORT = "train_report.json"
_SECRET = ("_token", "_key", "_secret")
"""How the names of options end whose values are not shown."""


@click.command(
    "train",
    epilog="Example: lora-tool train reward --config run.yaml --learning_rate 1e-4 --dry-run",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("method", type=click.Choice(list(METHODS)), metavar="METHOD")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[TRL OPTION]...")
@click.option("--config", type=UserPath(), help="TRL's YAML; a block `lora_tool:` in it is ours.")
@click.option(
    "--dry-run",
    is_flag=False,
    flag_value="full",
    type=click.Choice(["full", "static"]),
    help="Check everything and take no step; `static`: check the options alone, and print them.",
)
@click.option("--resume", metavar="auto|PATH", help="Resume from the last whole checkpoint, or from this one.")
@json_option
@quiet_option("No summary.")
def command(
    method: str,
    options: tuple[str, ...],
    config: Path | None,
    dry_run: str | None,
    resume: str | None,
    as_json: bool,  # noqa: FBT001 - click passes flags by name
    quiet: bool,  # noqa: FBT001
) -> int | None:
    """Train with TRL, and stop runs that cannot end well.

    METHOD is reward, sft, dpo, kto, grpo, rloo, cpo or orpo. Every option of TRL's config classes and of
    `accelerate launch` may be given, in the YAML or as --name value. Needs lora-tool[train].
    """
    from lora_tool.train.checks import require_inputs, static_findings, with_settings  # noqa: PLC0415 - after the usage is known to be right
    from lora_tool.train.config import read_run_config  # noqa: PLC0415
    from lora_tool.train.options import require_training  # noqa: PLC0415

    require_training()
    run, settings = with_settings(read_run_config(METHODS[method], config, options))
    require_inputs(run)
    after = _after_findings(run)
    run, choice = _resume(run, resume)
    for setting in settings:
        click.echo(printable(str(setting)), err=True)
    found = static_findings(run) if run.guard.mode != "off" else ()
    found = (*choice.skipped, *after, *found)
    _show(found)
    if choice.path is not None:
        click.echo(f"resuming from {printable(str(choice.path))}", err=True)
    outcome = _outcome(run, choice, found, dry_run=dry_run)
    if not dry_run:
        _write_report(run, settings, outcome)
    if as_json:
        click.echo(json.dumps(_report(run, settings, outcome), indent=2, default=str))
    elif dry_run == "static":
        _print_plan(run)
    from lora_tool.train.launch import require_good  # noqa: PLC0415

    outcome = _rescued(run, outcome)
    require_good(outcome)
    if not (as_json or quiet or dry_run == "static"):
        _summarise(run, outcome)
    return _after(run, outcome, as_json=as_json) if not dry_run else None


def _after_findings(run: RunConfig) -> tuple[Any, ...]:
    """Return what stands in the way of `after:`, before days are spent on what comes first."""
    from lora_tool.cli.after_training import after_command, foreseen  # noqa: PLC0415
    from lora_tool.train.launch import machine_rank  # noqa: PLC0415

    if not after_command(run, run.output) or machine_rank(run) != 0:
        return ()
    return tuple(item for item in foreseen(run, run.output) if item.code not in run.guard.ignore)


def _outcome(run: RunConfig, choice: ResumeChoice, found: tuple[Any, ...], *, dry_run: str | None) -> TrainingOutcome:
    """Return how it ended: refused here, or what the workers say."""
    from dataclasses import replace  # noqa: PLC0415

    from lora_tool.report import Severity  # noqa: PLC0415
    from lora_tool.train.job import TrainingOutcome, TrainingStatus  # noqa: PLC0415
    from lora_tool.train.launch import launch  # noqa: PLC0415

    if run.guard.mode == "stop" and any(item.severity is Severity.ERROR for item in found):
        return TrainingOutcome(status=TrainingStatus.REFUSED, findings=found)
    if dry_run == "static":
        return TrainingOutcome(status=TrainingStatus.CHECKED, findings=found)
    outcome = launch(run, dry_run=dry_run is not None, resume=choice.path, reported=[item.code for item in found])
    return replace(outcome, findings=(*found, *outcome.findings))


def _resume(run: RunConfig, resume: str | None) -> tuple[RunConfig, ResumeChoice]:
    """Return the run, and the checkpoint that it resumes from: what was typed, else TRL's own ``resume_from_checkpoint``."""
    from dataclasses import replace  # noqa: PLC0415

    from lora_tool.train.resume import ResumeChoice, last_valid, named  # noqa: PLC0415

    given = run.text("resume_from_checkpoint")
    asked = resume or ("auto" if given and given.lower() in ("true", "auto") else given)
    if asked is None or asked.lower() == "false":
        return run, ResumeChoice()
    choice = last_valid(run.output) if asked == "auto" else named(Path(asked))
    if choice.path is None:
        click.echo(f"no checkpoint to resume from in {printable(str(run.output))}: starting at step 0", err=True)
    return replace(run, resuming=choice.path is not None), choice


def _show(found: tuple[Any, ...]) -> None:
    for item in found:
        subject = f"{item.subject} " if item.subject else ""
        tell(str(item.severity), f"{item.code}: {item.path}: {subject}{item.message}")
        if item.hint:
            tell("  hint", item.hint)


def _print_plan(run: RunConfig) -> None:
    import yaml  # noqa: PLC0415 - comes with the extra

    from lora_tool.train.launch import launch_command  # noqa: PLC0415

    click.echo(f"# {shlex.join(launch_command(run))}")
    given = {name: getattr(value, "value", value) for name, value in run.options.items() if name in run.given}
    shown = {name: "***" if name.endswith(_SECRET) else value for name, value in given.items()}
    click.echo(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip())


def _report(run: RunConfig, settings: tuple[Setting, ...], outcome: TrainingOutcome) -> dict[str, Any]:
    from lora_tool.report import Report  # noqa: PLC0415
    from lora_tool.report.json import report_json  # noqa: PLC0415

    return {
        **report_json(Report(findings=outcome.findings)),
        "method": run.method.name,
        "status": outcome.status.value,
        "output": outcome.facts.get("output"),
        "settings": {item.name: item.value for item in settings},
        "notes": list(outcome.notes),
        "facts": _plain(outcome.facts),
        "error": outcome.error,
        "hint": outcome.hint,
    }


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the value with NaN and infinity as words, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write_report(run: RunConfig, settings: tuple[Setting, ...], outcome: TrainingOutcome) -> None:
    """Leave the report in the run's folder, where it was begun; no path of this machine in it, for it may be pushed."""
    output = run.output
    if output.is_dir():
        table = _report(run, settings, outcome)
        for item in table["findings"]:
            item["path"] = Path(item["path"]).name
        table["output"] = table["facts"]["output"] = "." if outcome.facts.get("output") == str(output) else None
        report = json.dumps(table, indent=2, default=str)
        part = output / f".{REPORT}.part"
        part.write_text(report + "\n", encoding="utf-8")
        part.replace(output / REPORT)


def _summarise(run: RunConfig, outcome: TrainingOutcome) -> None:
    facts = outcome.facts
    warnings = sum(str(item.severity) == "warning" for item in outcome.findings)
    seen = counted(warnings, "warning") if warnings else "no findings"
    if outcome.status.value == "checked":
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
    click.echo(f"wrote {printable(str(facts.get('output')))}{head}; the report is {REPORT} in it")


def _rescued(run: RunConfig, outcome: TrainingOutcome) -> TrainingOutcome:
    """Return the outcome with an adapter without values reassembled from the rank files, where that was requested."""
    from dataclasses import replace  # noqa: PLC0415

    from lora_tool.train.job import TrainingStatus  # noqa: PLC0415
    from lora_tool.train.rescue import EMPTY, consolidate, newest_rank_files  # noqa: PLC0415

    empty = outcome.status is TrainingStatus.BAD_RESULT and any(item.code == EMPTY for item in outcome.findings)
    output = run.output
    checkpoint = newest_rank_files(output) if empty and run.after.consolidate else None
    if checkpoint is None or not consolidate(checkpoint, output / "consolidated"):
        return outcome
    click.echo(f"reassembled the adapter from the rank files of {printable(str(checkpoint))}", err=True)
    facts = {**outcome.facts, "output": str(output / "consolidated")}
    return replace(outcome, status=TrainingStatus.DONE, facts=facts)


def _after(run: RunConfig, outcome: TrainingOutcome, *, as_json: bool) -> int | None:
    from lora_tool.cli.after_training import after_command, carry_on  # noqa: PLC0415
    from lora_tool.train.launch import machine_rank  # noqa: PLC0415

    output = Path(str(outcome.facts.get("output", run.output)))
    if not after_command(run, output) or machine_rank(run) != 0:
        return None
    # with --json, stdout is the report's alone
    return carry_on(run, output, stdout=sys.stderr.fileno() if as_json else None)
