"""`lora-tool guard -- CMD`: the guards of `train`, attached to an unmodified TRL or transformers command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from lora_tool.cli.options import ignore_option, json_option
from lora_tool.display import counted, printable
from lora_tool.errors import TrainingFailed, TrainingStopped
from lora_tool.report import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_tool.report import Finding
    from lora_tool.train.config import GuardSettings
    from lora_tool.train.job import TrainingOutcome
    from lora_tool.train.remains import Saved


@click.command(
    "guard",
    epilog="Example: lora-tool guard -- trl sft --config run.yaml",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--mode",
    type=click.Choice(["stop", "warn"]),
    default="stop",
    show_default=True,
    help="What a guard does when it finds a fault: stop the run, or only warn.",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of consecutive steps without a signal that stops the run.",
)
@ignore_option("Guards to switch off.")
@json_option
def command(words: tuple[str, ...], *, mode: str, window: int, ignore: tuple[str, ...], as_json: bool) -> int:
    """Run a training command with guards attached to its HF Trainer; neither script nor config is changed.

    The command may be `trl`, `accelerate launch`, `torchrun`, `deepspeed` or a Python script, in the environment that
    has lora-tool. When it ends, its result is checked. Its output is passed through, and so is its exit code if it
    fails on its own. Exit code 1 means that a guard stopped it, or that its result is bad. Needs lora-tool[train].
    """
    from lora_tool.train.config import GuardSettings, require_training  # after the usage is known
    from lora_tool.train.job import read_outcomes
    from lora_tool.train.remains import saved_in
    from lora_tool.train.traps import CODES

    require_training(("torch", "transformers", "accelerate"))
    unknown = [name for name in ignore if name not in CODES]
    if unknown:
        raise click.UsageError(f"unknown guard {unknown[0]!r}; the guards are {', '.join(CODES)}")
    begun = time.time()
    with tempfile.TemporaryDirectory(prefix="lora-tool-guard-") as folder:
        settings = GuardSettings(mode=mode, window=window, ignore=ignore)
        code = _run(words, Path(folder), settings, own_stdout=not as_json)
        outcomes = read_outcomes(Path(folder))
    outputs = sorted({Path(path) for outcome in outcomes for path in outcome.facts["outputs"]})
    saved = tuple(saved_in(outputs, since=begun - 1))
    rescued = tuple(_rescue(item) for item in saved if item.empty)
    ended = _Ended(words=words, code=code, outcomes=outcomes, saved=saved, rescued=rescued)
    if as_json:
        click.echo(json.dumps(ended.to_json(), indent=2))
    return ended.judged(quiet=as_json)


class _Ended(Struct, frozen=True, kw_only=True):
    """How a command ended: its exit code, what its trainings saw, the results that they left, and those put together."""

    words: tuple[str, ...]
    code: int
    outcomes: Sequence[TrainingOutcome]
    saved: Sequence[Saved]
    rescued: Sequence[Path | None]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the guards found, once: every rank of a training says the same."""
        return tuple(dict.fromkeys(found for outcome in self.outcomes for found in outcome.findings))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What is wrong with the results."""
        return tuple(error for item in self.saved for error in item.errors)

    @property
    def stopped(self) -> TrainingOutcome | None:
        """The training that a guard stopped, None where none was."""
        from lora_tool.train.job import TrainingStatus  # after the usage is known to be right

        return next((outcome for outcome in self.outcomes if outcome.status is TrainingStatus.STOPPED), None)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        from lora_tool.report import Report  # after the usage is known to be right
        from lora_tool.report.json import report_json
        from lora_tool.train.job import TrainingStatus

        bad = TrainingStatus.BAD_RESULT if self.errors else TrainingStatus.DONE
        status = TrainingStatus.STOPPED if self.stopped else bad
        return {
            **report_json(Report(findings=(*self.findings, *self.errors))),
            "command": list(self.words),
            "exit_code": self.code,
            "status": str(status) if self.outcomes else "unguarded",
            "results": [str(item.path) for item in self.saved],
            "consolidated": [str(path) for path in self.rescued if path],
        }

    def judged(self, *, quiet: bool) -> int:
        """Return the exit code. Raises `TrainingStopped` for a stopped run or a bad result, `TrainingFailed` for no run."""
        if (stopped := self.stopped) is not None:
            click.echo(err=True)  # it was stopped within the line of a progress bar
            raise TrainingStopped(f"lora-tool stopped the training: {stopped.error}", hint=stopped.hint)
        if self.code:
            how = f"exit code {self.code}" if self.code > 0 else signal.Signals(-self.code).name
            click.echo(f"error: {printable(self.words[0])} failed with {how}; see its output above", err=True)
            return self.code if self.code > 0 else 128 - self.code  # as a shell has it
        if self.errors:
            rescue = f"; reassembled from the rank files in {self.rescued[0]}" if any(self.rescued[:1]) else ""
            raise TrainingStopped(f"the result is bad: {self.errors[0]}{rescue}", hint=self.errors[0].hint)
        if not self.outcomes:
            raise TrainingFailed(
                f"{self.words[0]} succeeded, but created no HF Trainer, so nothing was guarded",
                hint="run it with the Python environment that has lora-tool",
            )
        if not quiet:
            warnings = sum(item.severity is Severity.WARNING for item in self.findings)
            seen = f"{counted(warnings, 'warning')}, {counted(len(self.saved), 'result')} checked"
            click.echo(f"guarded {printable(self.words[0])}: {seen}", err=True)
        return 0


def _run(words: tuple[str, ...], folder: Path, settings: GuardSettings, *, own_stdout: bool) -> int:
    """Run the command with the guard's settings in `folder`, and return its exit code."""
    from lora_tool import train
    from lora_tool.train.job import FOLDER_VARIABLE, TrainingJob, write_job
    from lora_tool.train.launch import run_group

    write_job(TrainingJob(guard=settings), folder)
    attach = Path(train.__file__).parent / "attach"
    paths = [str(attach), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), FOLDER_VARIABLE: str(folder)}
    try:
        return run_group(words, environment, own_stdout=own_stdout)
    except (FileNotFoundError, PermissionError) as error:
        raise TrainingFailed(f"{words[0]}: {error.strerror}", hint=f"check the command: {shlex.join(words)}") from error


def _rescue(item: Saved) -> Path | None:
    """Put the adapter together beside the empty one, which is left as it is; return where, None where it cannot be."""
    from lora_tool.train.remains import newest_rank_files, reassemble

    checkpoint = newest_rank_files(item.path) or newest_rank_files(item.path.parent)
    out = item.path.parent / f"{item.path.name}-consolidated"
    return out if checkpoint is not None and not out.exists() and reassemble(checkpoint, out) else None
