"""What the command and the processes that train tell each other, as JSON files in a temporary folder of this machine."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from lora_tool.core.choices import TextEnum
from lora_tool.core.report import Finding

FOLDER_VARIABLE = "LORA_TOOL_JOB"
"""Environment variable that names the folder to guarded processes."""
_JOB = "job.json"
_PEER_LOST = re.compile(r"connection (closed|reset)|gloo|nccl|socket|broken pipe", re.IGNORECASE)
"""Errors of a process whose peer has died; the peer's end is the cause."""


class GuardSettings(Struct, frozen=True, kw_only=True):
    """What the guards do: `stop` a doomed run, only `warn`, or `off`. `window` counts optimizer steps."""

    mode: str = "stop"
    window: int = 10
    ignore: Sequence[str] = ()


class TrainingJob(Struct, frozen=True, kw_only=True):
    """What guarded processes have to know."""

    guard: GuardSettings
    ours: bool = False
    """Whether `train` launched it: its output folder is cleared, and errors of TRL are reported."""
    typed: frozenset[str] = frozenset()
    """The options of the run that its command line gives."""
    dry_run: bool = False
    """Whether the training ends before its first step."""


@enum.unique
class TrainingStatus(TextEnum):
    """How the training of one process ended. CHECKED: a dry run without errors."""

    DONE = "done"
    CHECKED = "checked"
    STOPPED = "stopped"
    FAILED = "failed"


class TrainingOutcome(Struct, frozen=True, kw_only=True):
    """How the training of one process ended and what was seen. `facts` are figures for the report."""

    status: TrainingStatus
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    hint: str | None = None


def write_job(job: TrainingJob, folder: Path) -> None:
    """Write the job into `folder`."""
    (folder / _JOB).write_bytes(msgspec.json.encode(job))


def read_job(folder: Path) -> TrainingJob:
    """Return the job in `folder`."""
    return msgspec.json.decode((folder / _JOB).read_bytes(), type=TrainingJob)


def write_outcome(folder: Path, rank: int, outcome: TrainingOutcome) -> None:
    """Write how this process ended, whole or not at all."""
    name = f"outcome-{rank}-{os.getpid()}"  # a command under guard may train several times, one process after another
    part = folder / f".{name}.part"
    part.write_bytes(msgspec.json.encode(outcome, enc_hook=str))
    part.replace(folder / f"{name}.json")


def read_outcomes(folder: Path) -> list[TrainingOutcome]:
    """Return the outcomes of the processes on this machine, the lowest rank's newest first.

    A failure comes before everything else, and a cause before the failures of its peers.
    """
    paths = sorted(
        folder.glob("outcome-*.json"), key=lambda path: (int(path.stem.split("-")[1]), -path.stat().st_mtime)
    )
    outcomes = [msgspec.json.decode(path.read_bytes(), type=TrainingOutcome) for path in paths]
    return sorted(outcomes, key=_order)


def _order(outcome: TrainingOutcome) -> int:
    if outcome.status is not TrainingStatus.FAILED:
        return 1 - (outcome.status is TrainingStatus.STOPPED) * 2
    return 0 if _PEER_LOST.search(outcome.error or "") else -2
