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
from lora_tool.train.config import GuardSettings, RunConfig
from lora_tool.train.methods import METHODS, Method

JOB_FILE = "job.json"
TRACEBACK = "traceback-{rank}.txt"
FOLDER_VARIABLE = "LORA_TOOL_JOB"
"""Environment variable that names the folder to a worker, or to a command under `lora-tool guard`."""


@enum.unique
class Status(str, enum.Enum):
    """How a run ended. CHECKED: a dry run that found nothing in the way."""

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
class Job:
    """What a worker is to do."""

    folder: Path
    method: Method
    options: Mapping[str, Any]
    """What the config file says, and what was set."""
    arguments: tuple[str, ...]
    """What was typed, as TRL's parser takes it."""
    guard: GuardSettings
    config_path: str | None = None
    dry_run: bool = False
    resume: str | None = None
    told: tuple[str, ...] = ()
    """Codes that the parent has reported already."""
    processes: int | None = None
    """How many processes the launcher was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended and what was seen. `facts` are figures for the report."""

    status: Status
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    hint: str | None = None
    rank: int = 0


def write_job(run: RunConfig, folder: Path, **rest: Any) -> Job:
    """Write the job of a run into `folder` and return it."""
    job = Job(
        folder=folder,
        method=run.method,
        options={name: value for name, value in run.options.items() if name not in run.typed},
        arguments=run.arguments,
        guard=run.guard,
        config_path=str(run.path) if run.path else None,
        **rest,
    )
    raw = asdict(job) | {"method": job.method.name, "folder": None}
    (folder / JOB_FILE).write_text(json.dumps(raw, default=str), encoding="utf-8")
    return job


def read_job(folder: Path) -> Job:
    """Return the job in `folder`."""
    raw = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    guard = raw["guard"]
    return Job(
        **raw
        | {
            "folder": folder,
            "method": METHODS[raw["method"]],
            "arguments": tuple(raw["arguments"]),
            "told": tuple(raw["told"]),
            "guard": GuardSettings(mode=guard["mode"], window=guard["window"], ignore=tuple(guard["ignore"])),
        }
    )


def write_begun(folder: Path, rank: int) -> None:
    """Leave a sign that this process came to life: one that leaves no outcome then was killed."""
    (folder / f"begun-{rank}").touch()


def ended_silently(folder: Path) -> list[int]:
    """Return the ranks of processes on this machine that began and told nothing about their end."""
    begun = {int(path.name.split("-")[1]) for path in folder.glob("begun-*")}
    return sorted(begun - {int(path.stem.split("-")[1]) for path in folder.glob("outcome-*.json")})


def write_outcome(folder: Path, rank: int, outcome: Outcome) -> None:
    """Write how this process ended, whole or not at all."""
    name = f"outcome-{rank}-{os.getpid()}"  # a command under guard may train several times, one process after another
    part = folder / f"{name}.part"
    part.write_text(json.dumps(asdict(outcome) | {"rank": rank}, default=str), encoding="utf-8")
    part.replace(folder / f"{name}.json")


def read_outcomes(folder: Path) -> list[Outcome]:
    """Return the outcomes of the processes on this machine, that of the lowest rank first, its newest first."""

    def place(path: Path) -> tuple[int, float]:
        return int(path.stem.split("-")[1]), -path.stat().st_mtime

    found = []
    for path in sorted(folder.glob("outcome-*.json"), key=place):
        raw = json.loads(path.read_text(encoding="utf-8"))
        findings = tuple(Finding(**item | {"severity": Severity(item["severity"])}) for item in raw["findings"])
        found.append(
            Outcome(**raw | {"status": Status(raw["status"]), "findings": findings, "notes": tuple(raw["notes"])})
        )
    return found
