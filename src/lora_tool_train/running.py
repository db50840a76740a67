"""A guarded training: run as `train` runs it, and how it ended, for both commands, as an error and as JSON data."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from msgspec import Struct
from msgspec.structs import replace

from lora_tool.cli.exit_codes import exit_code
from lora_tool.cli.terminal import show_error
from lora_tool.core.display import counted, printable
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report import Finding, Report, Severity
from lora_tool_train.config import RunConfig
from lora_tool_train.job import TrainingJob, TrainingOutcome, TrainingStatus
from lora_tool_train.launch import run_guarded
from lora_tool_train.results import REJECTED, ResumeChoice, Saved, clear_output, judge_saved, last_valid, named, record
from lora_tool_train.traps import TrainingFailed, TrainingStopped


class Ended(Struct, frozen=True, kw_only=True):
    """How a training ended: refused before it began, or with an exit code, its processes' outcomes and its results."""

    refused: Finding | None = None
    """The error for which it did not start."""
    before: tuple[Finding, ...] = ()
    """Findings about its configuration."""
    code: int = 0
    outcomes: Sequence[TrainingOutcome] = ()
    saved: Sequence[Saved] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, once: every process of a training has the same."""
        seen = (*self.before, *(found for outcome in self.outcomes for found in outcome.findings), *self.errors)
        return tuple(dict.fromkeys(seen))

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(error for item in self.saved for error in item.errors)

    @property
    def status(self) -> str:
        """One word for it, for programs."""
        if self.refused:
            return "refused"
        if self.errors:
            return "bad-result"
        return str(self.outcomes[0].status) if self.outcomes else "unguarded"

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.outcomes[0].facts) if self.outcomes else {}

    @property
    def first_machine(self) -> bool:
        """Whether the process that saves ran on this machine."""
        return not self.facts.get("rank")

    def error(self) -> LoraToolError | None:
        """Return the error that the training ended with, None if it ended well."""
        if self.refused:
            found = self.refused
            return TrainingStopped(f"training did not start: {found.code}: {found.message}", hint=found.hint)
        first = self.outcomes[0] if self.outcomes else None
        if first is not None and first.status is TrainingStatus.STOPPED:
            return TrainingStopped(f"lora-tool stopped the training: {first.error}", hint=first.hint)
        if first is not None and first.status is TrainingStatus.FAILED:
            return TrainingFailed(first.error or "training failed", hint=first.hint)
        if self.errors:
            return TrainingStopped(f"the result is bad: {self.errors[0]}", hint=self.errors[0].hint)
        return None

    def show(self, *, as_json: bool, **more: Any) -> int:
        """Print the report, with `more` keys in it, where it is wanted as JSON; print the error; return the exit code."""
        error = self.error()
        if as_json:
            ending = {"error": str(error), "hint": error.hint} if error else {"error": None, "hint": None}
            table = {
                **Report(findings=self.findings).to_json(),
                "status": self.status,
                "results": [str(item.path) for item in self.saved],
                "facts": self.facts,
                **ending,
                **more,
            }
            click.echo(json.dumps(table, indent=2, default=str))
        if error is None:
            return 0
        if self.outcomes:
            click.echo(err=True)  # it may have ended within the line of a progress bar
        show_error(error)
        return exit_code(error)

    def counts(self) -> str:
        """Return how many warnings there were, in words."""
        warnings = sum(item.severity is Severity.WARNING for item in self.findings)
        return counted(warnings, "warning") if warnings else "no findings"


def resumed(run: RunConfig, resume: str | None) -> ResumeChoice:
    """Return the checkpoint that the run resumes from: what was typed, else TRL's ``resume_from_checkpoint``."""
    wanted = resume or run.text("resume_from_checkpoint") or "false"
    if wanted.lower() == "false":
        return ResumeChoice()
    choice = last_valid(run.output) if wanted.lower() in ("auto", "true") else named(Path(wanted))
    none = f"found no complete checkpoint in {run.output}: starting at step 0"
    click.echo(printable(f"resuming from {choice.path}" if choice.path else none), err=True)
    return choice


def refusal(run: RunConfig, found: Sequence[Finding]) -> Finding | None:
    """Return the finding for which the run does not start, None if it does."""
    return next((item for item in found if item.severity is Severity.ERROR and run.guard.mode == "stop"), None)


def train(run: RunConfig, choice: ResumeChoice, found: Sequence[Finding], *, dry_run: bool) -> Ended:
    """Return how it ended: refused here, or as the workers and what they saved show."""
    refused = refusal(run, found)
    if refused is not None:
        return Ended(refused=refused, before=tuple(found))
    job = TrainingJob(guard=run.guard, ours=True, typed=run.typed, dry_run=dry_run)
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
    given: dict[str, Any] = {name: getattr(run.options[name], "value", run.options[name]) for name in run.given}
    given["resume_from_checkpoint"] = str(choice.path) if choice.path else None
    (folder / "run.yaml").write_text(yaml.safe_dump(given, allow_unicode=True), encoding="utf-8")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *run.launch]
    method = [run.method.name] if run.method.experimental else []
    return [*launch, "-m", run.method.script, *method, "--config", str(folder / "run.yaml")]


def _judged(run: RunConfig) -> Saved:
    """Return the result in the run's folder; to a good one its base and method are added."""
    errors = tuple(item for item in judge_saved(run.output, run.method) if item.code not in run.guard.ignore)
    if not errors:
        base, revision = run.text("model_name_or_path"), run.text("model_revision")
        record(run.output, run.method, base=base or "", revision=revision)
    return Saved(path=run.output, errors=errors)


def summarise(run: RunConfig, ended: Ended, *, dry_run: bool) -> None:
    """Print what a good training did, and what is typed next."""
    facts, name = ended.facts, run.method.name
    if dry_run:
        for line in ("the first row, [[labels]] in brackets:", *facts["row"]) if facts.get("row") else ():
            click.echo(printable(line))
        click.echo(f"{name}: ready to train, {ended.counts()}")
        return
    moved = f", parameters moved by {facts['moved']:.3g}" if facts.get("moved") is not None else ""
    click.echo(f"trained {name}: {facts.get('steps')} steps{moved}, {ended.counts()}")
    if ended.first_machine:
        click.echo(printable(f"wrote {run.output}"))
        if (run.output / "adapter_config.json").is_file():
            click.echo(f"next: lora-tool merge {printable(shlex.quote(str(run.output)))}")
