"""Guarded processes: started with the guard on their path, told to end together, and heard when they have ended."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_tool_train.job import FOLDER_VARIABLE, TrainingJob, TrainingOutcome, read_outcomes, write_job
from lora_tool_train.traps import TrainingFailed

_ENDINGS = ((signal.SIGINT, 20.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0))
"""Signals to a command that is to end, with the seconds that it has after each."""
_STDERR = 2
_LAST_WORDS = 5.0
"""Seconds that workers have after their launcher: trackers say goodbye. `--resume auto` judges what they were saving."""


def run_guarded(
    words: Sequence[str], job: TrainingJob, *, env: Mapping[str, str] | None = None, own_stdout: bool = False
) -> tuple[int, list[TrainingOutcome]]:
    """Run a command with the guard in each of its Python processes; return its exit code and how trainings ended.

    Its stdout is our stderr, or `own_stdout`. Raises `TrainingFailed` if there is no such command.
    """
    with tempfile.TemporaryDirectory(prefix="lora-tool-train-") as name:
        write_job(job, Path(name))
        environment = {**os.environ, **(env or {}), FOLDER_VARIABLE: name}
        paths = [str(Path(__file__).parent / "attach"), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        try:
            code = run_group(words, environment, own_stdout=own_stdout)
        except (FileNotFoundError, PermissionError) as error:
            hint = f"check the command: {shlex.join(words)}"
            raise TrainingFailed(f"{words[0]}: {error.strerror}", hint=hint) from error
        return code, read_outcomes(Path(name))


def run_group(arguments: Sequence[str], environment: dict[str, str], *, own_stdout: bool = False) -> int:
    """Run a command in a process group of its own and return its exit code; its stdout is our stderr, or `own_stdout`.

    Ctrl-C and SIGTERM reach every process of the group once, which then has time to end. A command that a signal ended
    leaves nothing behind either. Raises `KeyboardInterrupt`.
    """
    process = subprocess.Popen(  # noqa: S603 - our own command line
        list(arguments), env=environment, stdout=None if own_stdout else _STDERR, start_new_session=True
    )
    try:
        code = process.wait()
        if code < 0:
            _end_group(process)
    except KeyboardInterrupt:
        _end_group(process)
        raise
    return code


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
