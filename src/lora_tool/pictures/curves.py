"""Training curves: what a run logged, from its `trainer_state.json`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TypeGuard

from lora_tool.formats.files import read_json
from lora_tool.pictures.figures import Curves

_FIRST = ("loss", "eval_loss", "rewards/accuracies", "accuracy", "reward", "grad_norm", "learning_rate")
"""What is looked at first; everything else follows by name."""
_NOT_DRAWN = frozenset({"step", "epoch", "total_flos", "num_input_tokens_seen"})
_SUMMED_UP = ("train_", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def training_curves(path: Path) -> Curves:
    """Return what the state file `path` logged, by name; entries that are no numbers are left out. Raises `CorruptFile`."""
    raw = read_json(path)
    history = raw.get("log_history") if isinstance(raw, dict) else None
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in history if isinstance(history, list) else ():
        step = entry.get("step") if isinstance(entry, dict) else None
        if not _is_number(step):
            continue
        for name, value in entry.items():
            if _is_number(value) and name not in _NOT_DRAWN and not name.startswith(_SUMMED_UP):
                curves[name].append((float(step), float(value)))
    order = {name: at for at, name in enumerate(_FIRST)}
    return {name: curves[name] for name in sorted(curves, key=lambda name: (order.get(name, len(order)), name))}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
