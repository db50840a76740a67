"""What parent and worker tell each other, as JSON files in a temporary folder of this machine."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from lora_tool.choices import TextEnum
from lora_tool.report import Finding, Severity
from lora_tool.train.config import GuardSettings
from lora_tool.train.methods import METHODS, Method

JOB_FILE = "job.json"
FOLDER_VARIABLE = "LORA_TOOL_JOB"
"""Environment variable that names the folder to a worker, or to a command under `lora-tool guard`."""


@enum.unique
class TrainingStatus(TextEnum):
    """How a training ended. CHECKED: a dry run that found nothing in the way."""

    DONE = "done"
    CHECKED = "checked"
    REFUSED = "refused"
    STOPPED = "stopped"
    BAD_RESULT = "bad-result"
    FAILED = "failed"
    USAGE = "usage"


class TrainingJob(Struct, frozen=True, kw_only=True):
    """What a worker is to do. A command under `lora-tool guard` reads the settings of the guard alone."""

    guard: GuardSettings
    method: Method = METHODS["sft"]
    options: Mapping[str, Any] = field(default_factory=dict)
    """All of TRL's, with their values."""
    dry_run: bool = False
    resume: str | None = None
    reported: Sequence[str] = ()
    """Codes that the parent has reported already."""
    processes: int | None = None
    """How many processes the launcher was asked for."""


class TrainingOutcome(Struct, frozen=True, kw_only=True):
    """How a training ended and what was seen. `facts` are figures for the report."""

    status: TrainingStatus
    findings: tuple[Finding, ...] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    hint: str | None = None
    traceback: str | None = None


def write_job(job: TrainingJob, folder: Path) -> None:
    """Write the job into `folder`."""
    raw = asdict(job) | {"method": job.method.name}
    (folder / JOB_FILE).write_text(json.dumps(raw, default=_plain), encoding="utf-8")


def _plain(value: object) -> object:
    return asdict(value) if isinstance(value, Struct) else str(value)


def read_job(folder: Path) -> TrainingJob:
    """Return the job in `folder`."""
    raw = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
    return TrainingJob(**raw | {"method": METHODS[raw["method"]], "guard": GuardSettings(**raw["guard"])})


def write_begun(folder: Path, rank: int) -> None:
    """Leave a sign that this process came to life: one that leaves no outcome then was killed."""
    (folder / f"begun-{rank}").touch()


def ended_silently(folder: Path) -> list[int]:
    """Return the ranks of processes on this machine that began and left no outcome."""
    begun, ended = ({_rank(path) for path in folder.glob(f"{name}-*")} for name in ("begun", "outcome"))
    return sorted(begun - ended)


def _rank(path: Path) -> int:
    return int(path.stem.split("-")[1])


def write_outcome(folder: Path, rank: int, outcome: TrainingOutcome) -> None:
    """Write how this process ended, whole or not at all."""
    name = f"outcome-{rank}-{os.getpid()}"  # a command under guard may train several times, one process after another
    part = folder / f".{name}.part"
    part.write_text(json.dumps(asdict(outcome), default=_plain), encoding="utf-8")
    part.replace(folder / f"{name}.json")


def read_outcomes(folder: Path) -> list[TrainingOutcome]:
    """Return the outcomes of the processes on this machine, that of the lowest rank first, its newest first."""
    paths = sorted(folder.glob("outcome-*.json"), key=lambda path: (_rank(path), -path.stat().st_mtime))
    outcomes = []
    for raw in (json.loads(path.read_text(encoding="utf-8")) for path in paths):
        findings = tuple(Finding(**item | {"severity": Severity(item["severity"])}) for item in raw["findings"])
        outcomes.append(TrainingOutcome(**raw | {"status": TrainingStatus(raw["status"]), "findings": findings}))
    return outcomes


def json_value(value: Any) -> Any:
    """Return the value as JSON has it: NaN and infinity as words, tensors as numbers; also inside a table."""
    if isinstance(value, Mapping):
        return {name: json_value(item) for name, item in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
