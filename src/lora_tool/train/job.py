"""What parent and worker tell each other, as JSON files in a temporary folder of this machine."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lora_tool.report import Finding, Severity
from lora_tool.train.config import GuardSettings
from lora_tool.train.methods import METHODS, Method

JOB_FILE = "job.json"
FOLDER_VARIABLE = "LORA_TOOL_JOB"
"""Environment variable that names the folder to a worker, or to a command under `lora-tool guard`."""


@enum.unique
class TrainingStatus(str, enum.Enum):
    """How a training ended. CHECKED: a dry run that found nothing in the way."""

    DONE = "done"
    CHECKED = "checked"
    REFUSED = "refused"
    STOPPED = "stopped"
    BAD_RESULT = "bad-result"
    FAILED = "failed"
    USAGE = "usage"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What a worker is to do. A command under `lora-tool guard` reads the settings of the guard alone."""

    guard: GuardSettings
    method: Method = METHODS["sft"]
    file: Mapping[str, Any] = field(default_factory=dict)
    """TRL's part of the config file, and what was set."""
    words: tuple[str, ...] = ()
    """What was typed."""
    dry_run: bool = False
    resume: str | None = None
    reported: tuple[str, ...] = ()
    """Codes that the parent has reported already."""
    processes: int | None = None
    """How many processes the launcher was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """How a training ended and what was seen. `facts` are figures for the report."""

    status: TrainingStatus
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    hint: str | None = None
    traceback: str | None = None
    rank: int = 0


def write_job(job: TrainingJob, folder: Path) -> None:
    """Write the job into `folder`."""
    raw = asdict(job) | {"method": job.method.name}
    (folder / JOB_FILE).write_text(json.dumps(raw, default=str), encoding="utf-8")


def read_job(folder: Path) -> TrainingJob:
    """Return the job in `folder`."""
    raw = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    guard = GuardSettings(**raw["guard"] | {"ignore": tuple(raw["guard"]["ignore"])})
    tuples = {name: tuple(raw[name]) for name in ("words", "reported")}
    return TrainingJob(**raw | tuples | {"method": METHODS[raw["method"]], "guard": guard})


def write_begun(folder: Path, rank: int) -> None:
    """Leave a sign that this process came to life: one that leaves no outcome then was killed."""
    (folder / f"begun-{rank}").touch()


def ended_silently(folder: Path) -> list[int]:
    """Return the ranks of processes on this machine that began and left no outcome."""
    begun = {int(path.name.split("-")[1]) for path in folder.glob("begun-*")}
    return sorted(begun - {int(path.stem.split("-")[1]) for path in folder.glob("outcome-*.json")})


def write_outcome(folder: Path, rank: int, outcome: TrainingOutcome) -> None:
    """Write how this process ended, whole or not at all."""
    name = f"outcome-{rank}-{os.getpid()}"  # a command under guard may train several times, one process after another
    part = folder / f"{name}.part"
    part.write_text(json.dumps(asdict(outcome) | {"rank": rank}, default=str), encoding="utf-8")
    part.replace(folder / f"{name}.json")


def read_outcomes(folder: Path) -> list[TrainingOutcome]:
    """Return the outcomes of the processes on this machine, that of the lowest rank first, its newest first."""

    def place(path: Path) -> tuple[int, float]:
        return int(path.stem.split("-")[1]), -path.stat().st_mtime

    return [
        _outcome(json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("outcome-*.json"), key=place)
    ]


def _outcome(raw: dict[str, Any]) -> TrainingOutcome:
    findings = tuple(Finding(**item | {"severity": Severity(item["severity"])}) for item in raw["findings"])
    known = {"status": TrainingStatus(raw["status"]), "findings": findings, "notes": tuple(raw["notes"])}
    return TrainingOutcome(**raw | known)
