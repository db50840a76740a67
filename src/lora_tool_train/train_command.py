"""`lora-tool train`: TRL's own script under the guard, its config checked before and its result after."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from lora_tool.cli.options import UserPath, json_option, quiet_option
from lora_tool.cli.terminal import tell
from lora_tool.core.display import printable
from lora_tool.core.errors import require_packages
from lora_tool_train.methods import METHODS

if TYPE_CHECKING:
    from lora_tool.core.report import Finding
    from lora_tool_train.config import RunConfig
    from lora_tool_train.remains import ResumeChoice, Saved
    from lora_tool_train.running import Ended

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")


@click.command(
    "train",
    short_help="Train with TRL; stop runs that are bound to fail.",
    epilog="Example: lora-tool train reward --config run.yaml --learning_rate 1e-4 --dry-run",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("method", type=click.Choice(list(METHODS)), metavar="METHOD")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[TRL OPTION]...")
@click.option("--config", type=UserPath(), help="TRL's YAML; its block `lora_tool:` is read by lora-tool.")
@click.option("--dry-run", is_flag=True, help="Build and check everything, but take no training step.")
@click.option("--resume", metavar="auto|PATH", help="Resume from the last complete checkpoint, or from this one.")
@json_option
@quiet_option("No summary.")
def command(
    method: str,
    options: tuple[str, ...],
    *,
    config: Path | None,
    dry_run: bool,
    resume: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train with TRL; stop runs that are bound to fail.

    METHOD is reward, sft, dpo, kto, grpo, rloo, cpo or orpo. Every option of TRL's config classes and of
    `accelerate launch` may be given, in the YAML or as --name value. Needs lora-tool[train].
    """
    from lora_tool_train.checks import require_inputs, static_findings, with_task_type
    from lora_tool_train.config import read_run_config

    require_packages(PACKAGES, extra="train")
    typed = read_run_config(METHODS[method], config, options)
    require_inputs(typed)
    run = with_task_type(typed)
    if run is not typed:
        click.echo("set lora_task_type: SEQ_CLS (with TRL's default CAUSAL_LM the score head is not saved)", err=True)
    choice = _resumed(run, resume)
    checked = static_findings(run) if run.guard.mode != "off" else ()
    found = [item for item in (*choice.skipped, *checked) if item.code not in run.guard.ignore]
    for item in found:
        tell(str(item.severity), f"{item.code}: {item.path}: {f'{item.subject} ' * bool(item.subject)}{item.message}")
        tell("  hint", str(item.hint))
    ended = _train(run, choice, found, dry_run=dry_run)
    code = ended.show(as_json=as_json, method=method)
    if not (code or as_json or quiet):
        _summarise(run, ended, dry_run=dry_run)
    return code


def _resumed(run: RunConfig, resume: str | None) -> ResumeChoice:
    """Return the checkpoint that the run resumes from: what was typed, else TRL's ``resume_from_checkpoint``."""
    from lora_tool_train.remains import ResumeChoice, last_valid, named

    wanted = resume or run.text("resume_from_checkpoint") or "false"
    if wanted.lower() == "false":
        return ResumeChoice()
    choice = last_valid(run.output) if wanted.lower() in ("auto", "true") else named(Path(wanted))
    none = f"found no complete checkpoint in {run.output}: starting at step 0"
    click.echo(printable(f"resuming from {choice.path}" if choice.path else none), err=True)
    return choice


def _train(run: RunConfig, choice: ResumeChoice, found: Sequence[Finding], *, dry_run: bool) -> Ended:
    """Return how it ended: refused here, or as the workers and what they saved show."""
    from lora_tool.core.report import Severity
    from lora_tool_train.job import TrainingJob, TrainingOutcome, TrainingStatus
    from lora_tool_train.launch import run_guarded
    from lora_tool_train.results import REJECTED, clear_output
    from lora_tool_train.running import Ended

    refusal = next((item for item in found if item.severity is Severity.ERROR and run.guard.mode == "stop"), None)
    if refusal is not None:
        return Ended(refused=refusal, before=tuple(found))
    job = TrainingJob(guard=run.guard, ours=True, dry_run=dry_run)
    is_new, good = not run.output.exists(), False
    try:
        with tempfile.TemporaryDirectory(prefix="lora-tool-run-") as folder:
            code, outcomes = run_guarded(launch_command(run, choice, Path(folder)), job, env=run.env)
        # a process of torch may be aborted when its work is done: that takes no result away
        if not outcomes or (code and outcomes[0].status is TrainingStatus.DONE and "steps" not in outcomes[0].facts):
            died = f"training ended with exit code {code} and without an error of Python: out of memory?"
            hint = "see the output above and the kernel's log (dmesg); --resume auto goes on from the last checkpoint"
            outcomes = [TrainingOutcome(status=TrainingStatus.FAILED, error=died, hint=hint)]
        ended = Ended(before=tuple(found), code=code, outcomes=outcomes)
        if ended.first_machine and ended.status == TrainingStatus.DONE:
            ended = replace(ended, saved=(_judged(run),))
        good = ended.error() is None
        return ended
    finally:
        if not (good or dry_run):
            clear_output(run.output, REJECTED)
        elif dry_run and is_new and run.output.is_dir() and not any(run.output.iterdir()):
            run.output.rmdir()  # transformers makes it before anything is written there


def launch_command(run: RunConfig, choice: ResumeChoice, folder: Path) -> list[str]:
    """Return the command that `trl` would run, with the options of the run in a file of `folder`."""
    import yaml

    given: dict[str, Any] = {name: getattr(run.options[name], "value", run.options[name]) for name in run.given}
    given["resume_from_checkpoint"] = str(choice.path) if choice.path else None
    (folder / "run.yaml").write_text(yaml.safe_dump(given, allow_unicode=True), encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *run.launch]
    method = [run.method.name] if run.method.experimental else []
    return [*launch, "-m", run.method.script, *method, "--config", str(folder / "run.yaml")]


def _judged(run: RunConfig) -> Saved:
    """Return the result in the run's folder; to a good one its base and method are added."""
    from lora_tool_train.remains import Saved
    from lora_tool_train.results import judge_saved, record

    errors = tuple(item for item in judge_saved(run.output, run.method) if item.code not in run.guard.ignore)
    if not errors:
        base, revision = run.text("model_name_or_path"), run.text("model_revision")
        record(run.output, run.method, base=base or "", revision=revision)
    return Saved(path=run.output, errors=errors)


def _summarise(run: RunConfig, ended: Ended, *, dry_run: bool) -> None:
    facts, name = ended.facts, run.method.name
    if dry_run:
        click.echo(f"{name}: ready to train, {ended.counts()}")
        return
    moved = f", parameters moved by {facts['moved']:.3g}" if facts.get("moved") is not None else ""
    click.echo(f"trained {name}: {facts.get('steps')} steps{moved}, {ended.counts()}")
    if ended.first_machine:
        click.echo(printable(f"wrote {run.output}"))
        if (run.output / "adapter_config.json").is_file():
            click.echo(f"next: lora-tool merge {printable(shlex.quote(str(run.output)))}")
