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
from dataclasses import replace
from pathlib import Path

from lora_tool.errors import BadRunConfig, TrainingFailed, TrainingStopped
from lora_tool.train.config import RunConfig
from lora_tool.train.job import (
    FOLDER_VARIABLE,
    TrainingJob,
    TrainingOutcome,
    TrainingStatus,
    ended_silently,
    read_outcomes,
    write_job,
)
from lora_tool.train.options import launch_words

WORKER = "lora_tool.train.worker"
_PATIENCE = 20.0
"""Seconds that the launcher has to end after an interrupt."""

_LAST_WORDS = 5.0
"""Seconds that workers have after their launcher: trackers say goodbye. What they were saving, `--resume auto` judges."""


_PEER_LOST = re.compile(r"connection (closed|reset)|gloo|nccl|socket|broken pipe", re.IGNORECASE)
"""What a worker says whose peer has died; the peer's end is the cause."""


def launch_command(run: RunConfig) -> list[str]:
    """Return the command that starts the workers."""
    return [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *launch_words(run.launch), "-m", WORKER]


def launch(
    run: RunConfig, *, dry_run: bool = False, resume: Path | None = None, reported: Sequence[str] = ()
) -> TrainingOutcome:
    """Return how the run ended. What workers print goes to stderr.

    `dry_run` builds the trainer and takes no step, `resume` is the checkpoint to go on from, `reported` are codes of
    findings that the user has seen. Raises `TrainingFailed` if the workers died silently.
    """
    job = TrainingJob(
        method=run.method,
        file=run.file,
        words=run.words,
        guard=run.guard,
        dry_run=dry_run,
        resume=str(resume) if resume else None,
        reported=tuple(reported),
        processes=_launch_number(run, "num_processes"),
    )
    with tempfile.TemporaryDirectory(prefix="lora-tool-train-") as name:
        folder = Path(name)
        write_job(job, folder)
        code = run_group(launch_command(run), {**os.environ, **run.env, FOLDER_VARIABLE: name})
        return _ended(folder, code)


def _ended(folder: Path, code: int) -> TrainingOutcome:
    """Return the outcome that tells why the workers ended: the cause before its effects."""
    outcomes = read_outcomes(folder)
    failed = [outcome for outcome in outcomes if outcome.status is TrainingStatus.FAILED]
    failed.sort(key=lambda outcome: bool(_PEER_LOST.search(outcome.error or "")))
    silent = ended_silently(folder)
    if code and failed and not (silent and _PEER_LOST.search(failed[0].error or "")):
        return _kept_traceback(failed[0])
    if code and silent:
        sys.stderr.write("\n")  # it may have died within the line of a progress bar
        ranks = "" if silent == [0] else f" of rank {', '.join(map(str, silent))}"
        raise TrainingFailed(
            f"the worker{ranks} died without an error: killed from outside (out of memory?), or by os._exit",
            hint="the kernel's log (dmesg) says whether memory ran out; --resume auto resumes from the last whole checkpoint",
        )
    if code or not outcomes:
        raise TrainingFailed(_died(code), hint="the lines above are the launcher's own")
    return outcomes[0]


def run_group(arguments: Sequence[str], environment: dict[str, str], *, own_stdout: bool = False) -> int:
    """Run a command in a process group of its own and return its exit code; its stdout is our stderr, or `own_stdout`.

    Ctrl-C and SIGTERM reach every process of the group once, which then has time to end. Raises `KeyboardInterrupt`.
    """
    process = subprocess.Popen(  # noqa: S603 - our own command line
        list(arguments), env=environment, stdout=None if own_stdout else _stderr(), start_new_session=True
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            _end(process)
        finally:  # also when a second Ctrl-C comes, and for what the launcher left behind
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise


def _stderr() -> int:
    """Return the file behind our stderr; the real one where stderr is no file, as under a test runner."""
    try:
        return sys.stderr.fileno()
    except OSError:
        return 2


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGINT, _PATIENCE), (signal.SIGTERM, _PATIENCE / 4), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
            break
    limit = time.monotonic() + _LAST_WORDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < limit:
            os.killpg(process.pid, 0)  # whether any process of the group is left
            time.sleep(0.1)


def _died(code: int) -> str:
    if code < 0:
        return f"the launcher was ended by {signal.Signals(-code).name}"
    return f"accelerate ended with exit code {code} before a worker began: it refused the launch"


def _kept_traceback(outcome: TrainingOutcome) -> TrainingOutcome:
    """Return the outcome with its traceback in a file, which the hint names."""
    if outcome.traceback is None:
        return outcome
    with tempfile.NamedTemporaryFile(
        "w", prefix="lora-tool-train-", suffix=".txt", delete=False, encoding="utf-8"
    ) as kept:
        kept.write(outcome.traceback)
    return replace(outcome, hint="; ".join(filter(None, (outcome.hint, f"the whole traceback is in {kept.name}"))))


def require_good(outcome: TrainingOutcome) -> None:
    """Return if the run ended well. Raises `TrainingStopped`, `TrainingFailed` or `BadRunConfig` otherwise."""
    if outcome.status in (TrainingStatus.DONE, TrainingStatus.CHECKED):
        return
    errors = [found for found in outcome.findings if found.severity.value == "error"]
    first = errors[0] if errors else None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if outcome.status is TrainingStatus.USAGE:
        raise BadRunConfig(outcome.error or "the options were not accepted", hint=outcome.hint)
    if outcome.status is TrainingStatus.FAILED:
        raise TrainingFailed(outcome.error or "the run failed", hint=outcome.hint)
    if outcome.status is TrainingStatus.STOPPED:
        raise TrainingStopped(f"training was stopped: {outcome.error}", hint=outcome.hint)
    what = "training did not start" if outcome.status is TrainingStatus.REFUSED else "the result is bad"
    kept = f"; it was kept in {outcome.facts['output']}" if "output" in outcome.facts else ""
    why = f": {first.code}: {first.message}" if first else ""
    raise TrainingStopped(f"{what}{why}{more}{kept}", hint=first.hint if first else None)


def machine_rank(run: RunConfig) -> int:
    """Return which machine of a multi-node run this is: from the launch options, or accelerate's config file."""
    return _launch_number(run, "machine_rank") or 0


def _launch_number(run: RunConfig, name: str) -> int | None:
    """Return a number that accelerate was given, None where it is left to accelerate or is none."""
    value = run.launch.get(name)
    words = [] if value is not None else launch_words(run.launch)
    if "--config_file" in words:
        import yaml  # noqa: PLC0415 - comes with the extra

        path = Path(words[words.index("--config_file") + 1])
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
        value = raw.get(name) if isinstance(raw, dict) else None
    return int(str(value)) if str(value).isdigit() else None
