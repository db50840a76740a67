"""`lora-tool guard -- CMD`: the guards of `train`, attached to an unmodified TRL or transformers command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lora_tool.cli.options import ignore_option, json_option
from lora_tool.display import counted, printable
from lora_tool.errors import TrainingFailed, TrainingStopped
from lora_tool.report import Severity

if TYPE_CHECKING:
    from lora_tool.train.config import GuardSettings
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
def command(words: tuple[str, ...], mode: str, window: int, ignore: tuple[str, ...], as_json: bool) -> int:  # noqa: FBT001
    """Run a training command with guards attached to its HF Trainer; neither script nor config is changed.

    The command may be `trl`, `accelerate launch`, `torchrun`, `deepspeed` or a Python script, in the environment that
    has lora-tool. When it ends, its result is checked. Its output is passed through, and so is its exit code if it
    fails by itself. Exit code 1 means that a guard stopped it, or that its result is bad. Needs lora-tool[train].
    """
    from lora_tool.report import Report  # noqa: PLC0415 - after the usage is known to be right
    from lora_tool.report.json import report_json  # noqa: PLC0415
    from lora_tool.train.config import GuardSettings, require_training  # noqa: PLC0415
    from lora_tool.train.job import TrainingStatus, read_outcomes  # noqa: PLC0415
    from lora_tool.train.remains import saved_in  # noqa: PLC0415
    from lora_tool.train.traps import CODES  # noqa: PLC0415

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
    saved = list(saved_in(outputs, since=begun - 1))
    rescued = [_rescue(item) for item in saved if item.empty]
    # every rank of a training says the same
    found = tuple(dict.fromkeys(found for outcome in outcomes for found in outcome.findings))
    stopped = next((outcome for outcome in outcomes if outcome.status is TrainingStatus.STOPPED), None)
    bad = [error for item in saved for error in item.errors]
    if as_json:
        status = TrainingStatus.STOPPED if stopped else TrainingStatus.BAD_RESULT if bad else TrainingStatus.DONE
        results = {
            "results": [str(item.path) for item in saved],
            "consolidated": [str(path) for path in rescued if path],
        }
        told = {"command": list(words), "exit_code": code, "status": str(status) if outcomes else "unguarded"}
        click.echo(json.dumps({**report_json(Report(findings=(*found, *bad))), **told, **results}, indent=2))
    if stopped is not None:
        click.echo(err=True)  # it was stopped within the line of a progress bar
        raise TrainingStopped(f"lora-tool stopped the training: {stopped.error}", hint=stopped.hint)
    if code:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        click.echo(f"error: {printable(words[0])} failed with {how}; see its output above", err=True)
        return code if code > 0 else 128 - code  # as a shell has it
    if bad:
        rescue = f"; reassembled from the rank files in {rescued[0]}" if rescued and rescued[0] else ""
        raise TrainingStopped(f"the result is bad: {bad[0]}{rescue}", hint=bad[0].hint)
    if not outcomes:
        raise TrainingFailed(
            f"{words[0]} succeeded, but created no HF Trainer, so nothing was guarded",
            hint="run it with the Python environment that has lora-tool",
        )
    if not as_json:
        warnings = sum(item.severity is Severity.WARNING for item in found)
        seen = f"{counted(warnings, 'warning')}, {counted(len(saved), 'result')} checked"
        click.echo(f"guarded {printable(words[0])}: {seen}", err=True)
    return 0


def _run(words: tuple[str, ...], folder: Path, settings: GuardSettings, *, own_stdout: bool) -> int:
    """Run the command with the guard's settings in `folder`, and return its exit code."""
    from lora_tool import train  # noqa: PLC0415
    from lora_tool.train.job import FOLDER_VARIABLE, TrainingJob, write_job  # noqa: PLC0415
    from lora_tool.train.launch import run_group  # noqa: PLC0415

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
    from lora_tool.train.remains import newest_rank_files, reassemble  # noqa: PLC0415

    checkpoint = newest_rank_files(item.path) or newest_rank_files(item.path.parent)
    out = item.path.parent / f"{item.path.name}-consolidated"
    return out if checkpoint is not None and not out.exists() and reassemble(checkpoint, out) else None
