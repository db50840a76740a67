"""Training curves: what a run logged, from its `trainer_state.json`."""

from __future__ import annotations

import math
from collections import defaultdict

from lora_tool.formats.trainer_state import TrainerState
from lora_tool.pictures.figures import Curves

_FIRST = ("loss", "eval_loss", "rewards/accuracies", "accuracy", "reward", "grad_norm", "learning_rate")
"""What is looked at first; everything else follows by name."""
_NOT_DRAWN = frozenset({"step", "epoch", "total_flos", "num_input_tokens_seen"})
_SUMMED_UP = ("train_", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def training_curves(state: TrainerState) -> Curves:
    """Return what the run logged, by name; NaN and infinities, which have no place on an axis, are left out."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in state.log:
        step = entry.get("step", math.nan)
        for name, value in entry.items():
            drawn = name not in _NOT_DRAWN and not name.startswith(_SUMMED_UP)
            if drawn and math.isfinite(value) and math.isfinite(step):
                curves[name].append((step, value))
    order = {name: at for at, name in enumerate(_FIRST)}
    return {name: curves[name] for name in sorted(curves, key=lambda name: (order.get(name, len(order)), name))}
