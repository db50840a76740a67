"""The parent of a run: it launches the workers, passes signals on, and reads how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from lora_tool.errors import BadRunConfig, TrainingFailed, TrainingStopped
from lora_tool.report import Severity
from lora_tool.train import lifeline
from lora_tool.train.config import WORKER, RunConfig
from lora_tool.train.job import (
    FOLDER_VARIABLE,
    TrainingJob,
    TrainingOutcome,
    TrainingStatus,
    ended_silently,
    read_outcomes,
    write_job,
)

LAUNCHER = "lora_tool.train.launcher"
_ENDINGS = ((signal.SIGINT, 20.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0))
"""Signals to a command that is to end, with the seconds that it has after each."""
_LAST_WORDS = 5.0
"""Seconds that workers have after their launcher: trackers say goodbye. What they were saving, `--resume auto` judges."""

_PEER_LOST = re.compile(r"connection (closed|reset)|gloo|nccl|socket|broken pipe", re.IGNORECASE)
"""What a worker says whose peer has died; the peer's end is the cause."""


def launch_command(run: RunConfig) -> list[str]:
    """Return the command that starts the workers."""
    return [sys.executable, "-m", LAUNCHER, "--quiet", *run.launch, "-m", WORKER]


def launch(
    run: RunConfig, *, dry_run: bool = False, resume: Path | None = None, reported: Sequence[str] = ()
) -> TrainingOutcome:
    """Return how the run ended. What workers print goes to stderr.

    `dry_run` builds the trainer and takes no step, `resume` is the checkpoint to go on from, `reported` are codes of
    findings that the user has seen. Raises `TrainingFailed` if the workers died silently.
    """
    job = TrainingJob(
        method=run.method,
        options=run.options,
        guard=run.guard,
        dry_run=dry_run,
        resume=str(resume) if resume else None,
        reported=reported,
        processes=run.processes,
    )
    with tempfile.TemporaryDirectory(prefix="lora-tool-train-") as name, lifeline.held(Path(name)):
        write_job(job, Path(name))
        code = run_group(launch_command(run), {**os.environ, **run.env, FOLDER_VARIABLE: name})
        return _ended(Path(name), code)


def _ended(folder: Path, code: int) -> TrainingOutcome:
    """Return the outcome that tells why the workers ended: the cause before its effects."""
    outcomes, silent = read_outcomes(folder), ended_silently(folder)
    if not code and outcomes:
        return outcomes[0]
    failed = [outcome for outcome in outcomes if outcome.status is TrainingStatus.FAILED]
    causes = [outcome for outcome in failed if not _PEER_LOST.search(outcome.error or "")]
    if causes or (failed and not silent):
        return _with_traceback((causes or failed)[0])
    if outcomes and not silent:
        sys.stderr.write(
            f"\nnote: exit code {code} of the launcher came after every worker was done: the result stands\n"
        )
        return outcomes[0]
    if code and silent:
        sys.stderr.write("\n")  # it may have died within the line of a progress bar
        ranks = "" if silent == [0] else f" of rank {', '.join(map(str, silent))}"
        raise TrainingFailed(
            f"the worker{ranks} died without an error: another process killed it (out of memory?), or it called "
            "os._exit",
            hint="check the kernel's log (dmesg) for out of memory; --resume auto resumes from the last complete "
            "checkpoint",
        )
    died = f"accelerate refused the launch: it ended with exit code {code} before a worker began"
    if code < 0:
        died = f"the launcher was killed by {signal.Signals(-code).name}"
    raise TrainingFailed(died, hint="see the launcher's output above")


def run_group(arguments: Sequence[str], environment: dict[str, str], *, own_stdout: bool = False) -> int:
    """Run a command in a process group of its own and return its exit code; its stdout is our stderr, or `own_stdout`.

    Ctrl-C and SIGTERM reach every process of the group once, which then has time to end. A command that a signal ended
    leaves nothing behind either. Raises `KeyboardInterrupt`.
    """
    process = subprocess.Popen(  # noqa: S603 - our own command line
        list(arguments), env=environment, stdout=None if own_stdout else _stderr(), start_new_session=True
    )
    try:
        code = process.wait()
        if code < 0:
            _end_group(process)
    except KeyboardInterrupt:
        _end_group(process)
        raise
    return code


def _stderr() -> int:
    """Return the file behind our stderr; the real one where stderr is no file, as under a test runner."""
    try:
        return sys.stderr.fileno()
    except OSError:
        return 2


def _signal(process: subprocess.Popen[bytes], sign: int) -> bool:
    """Send a signal to the group of `process`, 0 to ask; return whether anyone was there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, sign)
        return True
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        for sign, patience in _ENDINGS:
            _signal(process, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)
                break
        limit = time.monotonic() + _LAST_WORDS
        while time.monotonic() < limit and _signal(process, 0):
            time.sleep(0.1)
    finally:  # also when a second Ctrl-C comes, and for what the launcher left behind
        _signal(process, signal.SIGKILL)


def _with_traceback(outcome: TrainingOutcome) -> TrainingOutcome:
    """Return the outcome with its traceback in a file, which the hint names."""
    if outcome.traceback is None:
        return outcome
    number, name = tempfile.mkstemp(prefix="lora-tool-train-", suffix=".txt", text=True)
    with os.fdopen(number, "w", encoding="utf-8") as kept:
        kept.write(outcome.traceback)
    return replace(outcome, hint="; ".join(filter(None, (outcome.hint, f"the whole traceback is in {name}"))))


def require_good(outcome: TrainingOutcome) -> None:
    """Return if the run ended well. Raises `TrainingStopped`, `TrainingFailed` or `BadRunConfig` otherwise."""
    match outcome.status:
        case TrainingStatus.DONE | TrainingStatus.CHECKED:
            return
        case TrainingStatus.USAGE:
            raise BadRunConfig(outcome.error or "training refused the options", hint=outcome.hint)
        case TrainingStatus.FAILED:
            raise TrainingFailed(outcome.error or "the run failed", hint=outcome.hint)
        case TrainingStatus.STOPPED:
            raise TrainingStopped(f"lora-tool stopped the training: {outcome.error}", hint=outcome.hint)
        case TrainingStatus.REFUSED | TrainingStatus.BAD_RESULT:
            what = "training did not start" if outcome.status is TrainingStatus.REFUSED else "the result is bad"
            kept = f"; the result was kept in {outcome.facts['output']}" if "output" in outcome.facts else ""
            first, *others = [found for found in outcome.findings if found.severity is Severity.ERROR]
            more = f" (and {len(others)} more)" if others else ""
            raise TrainingStopped(f"{what}: {first.code}: {first.message}{more}{kept}", hint=first.hint)
