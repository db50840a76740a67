"""`trainer_state.json` of the HF Trainer: how far a run was when it wrote a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_tool.errors import BadConfig, CorruptFile, Defect, Problem
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import read_json

FILE_NAME = "trainer_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Step, epoch and last logged loss of a training run."""

    path: Path
    global_step: int
    epoch: float | None = None
    last_loss: float | None = None
    problems: tuple[Problem, ...] = ()


def read_trainer_state(path: Path) -> TrainerState:
    """Return the state in the file `path`. Raises `CorruptFile`, `BadConfig`."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise BadConfig(Problem(defect=Defect.BAD_FIELD, path=str(path), message="expected a JSON object"))
    fields = Fields(raw, path)
    history = raw.get("log_history")
    losses = [
        entry["loss"]
        for entry in (history if isinstance(history, list) else ())
        if isinstance(entry, dict) and isinstance(entry.get("loss"), int | float)
    ]
    epoch = raw.get("epoch")
    return TrainerState(
        path=path,
        global_step=fields.integer("global_step", 0),
        epoch=float(epoch) if isinstance(epoch, int | float) else None,
        last_loss=float(losses[-1]) if losses else None,
        problems=tuple(fields.problems),
    )


def try_trainer_state(path: Path) -> tuple[TrainerState | None, tuple[Problem, ...]]:
    """Return the state and its problems; (None, problems) where the file cannot be read."""
    try:
        state = read_trainer_state(path)
    except (CorruptFile, BadConfig) as error:
        return None, (error.problem,)
    return state, state.problems
