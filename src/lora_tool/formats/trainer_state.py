"""`trainer_state.json` of the HF Trainer: how far a run was when it wrote a checkpoint, and its log so far."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.errors import Problem
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import read_object

FILE_NAME = "trainer_state.json"
_STEP = re.compile(r"checkpoint-(\d{1,15})/?\Z")


class TrainerState(Struct, frozen=True, kw_only=True):
    """Where a training run was, and its log."""

    path: Path
    global_step: int
    epoch: float | None = None
    last_loss: float | None = None
    max_steps: int | None = None
    """The step at which the run was to end; None where that is not known."""
    best_metric: float | None = None
    best_step: int | None = None
    stopped: bool = False
    """Whether a callback, such as early stopping, or the last step ended the run."""
    log: tuple[Mapping[str, float], ...] = ()
    """The numbers of every log entry in order; NaN and infinities are kept."""
    problems: tuple[Problem, ...] = ()


def without_history(state: TrainerState) -> TrainerState:
    """Return the state with only its own step's log entries: each checkpoint of a run repeats the whole log."""
    return replace(state, log=tuple(entry for entry in state.log if entry.get("step") == state.global_step))


def read_trainer_state(path: Path) -> TrainerState:
    """Return the state in the file `path`. Raises `CorruptFile`, `BadConfig`."""
    raw = read_object(path)
    fields = Fields(raw, path)
    history = raw.get("log_history")
    log = tuple(
        {name: number for name, value in entry.items() if (number := _logged(value)) is not None}
        for entry in (history if isinstance(history, list) else ())
        if isinstance(entry, dict)
    )
    losses = [entry["loss"] for entry in log if "loss" in entry]
    max_steps = raw.get("max_steps")
    return TrainerState(
        path=path,
        global_step=fields.integer("global_step", 0),
        epoch=_logged(raw.get("epoch")),
        last_loss=losses[-1] if losses else None,
        max_steps=max_steps if type(max_steps) is int and max_steps > 0 else None,
        best_metric=_logged(raw.get("best_metric")),
        best_step=_best_step(raw),
        stopped=_control(raw).get("should_training_stop") is True,
        log=log,
        problems=tuple(fields.problems),
    )


def _best_step(raw: Mapping[str, Any]) -> int | None:
    """Return the step of the best checkpoint, which older versions of transformers name only by its folder."""
    step, folder = raw.get("best_global_step"), raw.get("best_model_checkpoint")
    if type(step) is int:
        return step
    named = _STEP.search(folder) if isinstance(folder, str) else None
    return int(named[1]) if named else None


def _logged(value: object) -> float | None:
    if type(value) is float:  # nearly all of them, in logs of many thousand entries
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return float("inf")


def _control(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the flags of the TrainerControl, which newer versions save with the callbacks."""
    found: object = raw
    for name in ("stateful_callbacks", "TrainerControl", "args"):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
