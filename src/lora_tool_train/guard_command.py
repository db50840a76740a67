"""`lora-tool guard -- CMD`: the guards of `train`, attached to an unmodified TRL or transformers command."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import click

from lora_tool.cli.options import Sectioned, json_option
from lora_tool.cli.terminal import tell
from lora_tool.core.display import counted, printable
from lora_tool.core.errors import require_packages
from lora_tool_train.traps import TrainingFailed


@click.command(
    "guard",
    cls=Sectioned,
    among="Training runs",
    no_args_is_help=True,
    short_help="Run any TRL or transformers command with the guards of `train`.",
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
@click.option("--ignore", multiple=True, metavar="CODES", help="Guards to switch off.")
@json_option
def command(words: tuple[str, ...], *, mode: str, window: int, ignore: tuple[str, ...], as_json: bool) -> int:
    """Run a training command with guards attached to its HF Trainer; neither script nor config is changed.

    The command may be `trl`, `accelerate launch`, `torchrun`, `deepspeed` or a Python script, in the environment that
    has lora-tool. When it ends, its result is checked. Its output is passed through, and so is its exit code if it
    fails on its own. Exit code 1 means that a guard stopped it, or that its result is bad. Needs lora-tool[train].
    """
    from lora_tool_train.job import GuardSettings, TrainingJob, TrainingStatus
    from lora_tool_train.launch import run_guarded
    from lora_tool_train.results import saved_in
    from lora_tool_train.running import Ended
    from lora_tool_train.traps import CODES

    require_packages(("torch", "transformers", "accelerate"), extra="train")
    codes = tuple(code.strip() for group in ignore for code in group.split(","))
    unknown = [code for code in codes if code not in CODES]
    if unknown:
        raise click.UsageError(f"unknown guard {unknown[0]!r}; the guards are {', '.join(CODES)}")
    begun = time.time()
    job = TrainingJob(guard=GuardSettings(mode=mode, window=window, ignore=codes))
    code, outcomes = run_guarded(words, job, own_stdout=not as_json)
    outputs = sorted({Path(path) for outcome in outcomes for path in outcome.facts["outputs"]})
    trained: dict[str, bool] = {}
    for outcome in outcomes:
        for name, is_trained in outcome.facts.get("adapters", {}).items():
            trained[name] = trained.get(name, False) or is_trained
    saved = tuple(saved_in(outputs, since=begun - 1, trained=trained))
    hint = next((outcome.hint for outcome in outcomes if outcome.status is TrainingStatus.FAILED), None)
    outcomes = [outcome for outcome in outcomes if outcome.status is not TrainingStatus.FAILED]
    stopped = any(outcome.status is TrainingStatus.STOPPED for outcome in outcomes)
    ended = Ended(code=code, outcomes=outcomes, saved=saved if stopped or not code else ())
    shown = ended.show(as_json=as_json, command=list(words), exit_code=code)
    if shown:
        return shown
    if code:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        click.echo(f"error: {printable(words[0])} failed with {how}; see its output above", err=True)
        if hint:
            tell("hint", hint)
        return code if code > 0 else 128 - code  # as a shell has it
    if not outcomes:
        raise TrainingFailed(
            f"{words[0]} succeeded, but created no HF Trainer, so nothing was guarded",
            hint="run it with the Python environment that has lora-tool",
        )
    if not as_json:
        others = sorted({item.unchecked for item in saved if item.unchecked})
        results = f"{counted(sum(not item.unchecked for item in saved), 'result')} checked"
        results += f", {', '.join(others)} not" if others else ""
        click.echo(f"guarded {printable(words[0])}: {ended.counts()}, {results}", err=True)
    return 0
