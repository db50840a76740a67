"""What a training run logged, as curves: the main ones first."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

from lora_tool.checkpoints import Folder, saves_in
from lora_tool.checkpoints.folders import read_folder
from lora_tool.core.errors import CheckpointError
from lora_tool.formats.trainer_state import TrainerState

Curves: TypeAlias = Mapping[str, tuple[tuple[float, float], ...]]
"""Name of what was logged → (step, value), in order."""

_MAIN = tuple(
    re.compile(pattern)
    for pattern in (
        r"(.*_)?loss",
        r"(.*[/_])?(accuracy|accuracies|mean_token_accuracy|f1|auc)",
        r"(.*[/_])?margins?",
        r"(eval_)?(.*_)?(?<!min_)(?<!max_)reward|(.*_)?rewards/(chosen|rejected)",
    )
)
"""What a run is judged by, in the order that it is looked at; everything else follows by name."""
_BESIDE = ("grad_norm", "entropy", "kl", "learning_rate")
_NOT_CURVES = frozenset({"step", "epoch", "total_flos", "num_input_tokens_seen"})
_SUMMED_UP = ("train_",)
_SPEED = re.compile(r"eval_(.*_)?(runtime|samples_per_second|steps_per_second|model_preparation_time|num_tokens)")


def is_main(name: str) -> bool:
    """Return whether the curve is one that runs are judged by: loss, accuracy, margins, rewards."""
    return any(pattern.fullmatch(name) for pattern in _MAIN)


def training_curves(state: TrainerState) -> Curves:
    """Return what the run logged, the main curves first; NaN and infinities, which have no place on an axis, are left out."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in state.log:
        step = entry.get("step", math.nan)
        for name, value in entry.items():
            drawn = name not in _NOT_CURVES and not name.startswith(_SUMMED_UP) and not _SPEED.fullmatch(name)
            if drawn and math.isfinite(value) and math.isfinite(step):
                curves[name].append((step, value))
    return {name: tuple(curves[name]) for name in sorted(curves, key=_rank)}


def _rank(name: str) -> tuple[int, bool, str]:
    main = next((at for at, pattern in enumerate(_MAIN) if pattern.fullmatch(name)), len(_MAIN))
    beside = _BESIDE.index(name) if name in _BESIDE else len(_BESIDE)
    return main + (beside if main == len(_MAIN) else 0), name.startswith("eval_"), name


def trainer_state_of(folder: Folder) -> TrainerState | None:
    """Return the state that a run left in its folder, else that of its latest checkpoint which has one."""
    if folder.trainer:
        return folder.trainer
    for name in reversed(saves_in(folder)):
        try:
            state = read_folder(folder.root / name).trainer
        except CheckpointError:
            continue
        if state is not None:
            return state
    return None
