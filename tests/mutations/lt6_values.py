"""LT605 to LT612, LT614, LT618 to LT620, LT625 to LT627: values of a merged model, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint_edits import PREFIX, Raw, fields, raw, tensors
from tests.mutations.merged_models import (
    F64,
    NORM,
    PAIRS,
    Q_PROJ,
    SCORE,
    base_of,
    deltas,
    flipped,
    numbers,
    quantised,
    remerged,
    stored,
    weights,
)
from tests.mutations.registry import CAUSAL_MERGED, MERGED, Edit, breaks, enter, merged_in


@breaks("LT606", MERGED, verified=True)
def _one_forgotten(folder: Path) -> None:
    base = base_of(folder)
    with weights(folder) as table:
        table[f"{Q_PROJ}.weight"] = base[f"{Q_PROJ}.weight"]


@breaks("LT607 without a head", CAUSAL_MERGED, verified=True)
def _the_base(folder: Path) -> None:
    base = base_of(folder)
    with weights(folder) as table:
        table.update(base)


@breaks("LT612", MERGED, verified=True)
def _of_another_run(folder: Path) -> None:
    noise = np.random.default_rng(5)

    def other(_name: str, delta: F64) -> F64:
        return np.asarray(noise.standard_normal(delta.shape) * np.abs(delta).mean())

    remerged(folder, other)


@breaks("LT614 by its bytes", CAUSAL_MERGED, with_base=True)
def _other_saved_by_bytes(folder: Path) -> None:
    with tensors(folder.parent / "adapter") as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16, dtype="BF16")
    with fields(folder.parent / "adapter") as config:
        config["modules_to_save"] = ["model.norm"]
    merged_in(folder.parent)
    base = base_of(folder)
    with weights(folder) as table:
        table["model.norm.weight"] = base["model.norm.weight"]


@breaks("LT618", MERGED, verified=True)
def _into_another_base(folder: Path) -> None:
    merged = set(deltas(folder)) | {SCORE}
    with weights(folder) as table:
        for name in table.keys() - merged:
            table[name] = flipped(table[name])


@breaks("LT619", MERGED, verified=True)
def _tiny(folder: Path) -> None:
    with tensors(folder.parent / "adapter") as table:
        for name, tensor in table.items():
            if "lora_B" in name:
                table[name] = stored(numbers(tensor) * 1e-4, tensor)
    merged_in(folder.parent)


@breaks("LT620", MERGED, verified=True, logits=True)
def _sees_two_tokens(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config.update(use_sliding_window=True, sliding_window=2, layer_types=["sliding_attention"] * 2)


@breaks("LT627", CAUSAL_MERGED, verified=True)
def _added_to_the_codes(folder: Path) -> None:
    name = f"{Q_PROJ}.weight"
    codes = quantised(folder.parent / "base", name)
    merged_in(folder.parent)
    with weights(folder) as table:
        table[name] = stored(codes + deltas(folder)[name], table[name])


@breaks("LT625", MERGED, verified=True, pairs=PAIRS, min_accuracy=0.9)
def _trained_on_swapped_columns(folder: Path) -> None:
    with tensors(folder.parent / "adapter") as table:
        name = next(name for name in table if name.endswith("score.weight"))
        table[name] = stored(-numbers(table[name]), table[name])
    merged_in(folder.parent)


def _set(rows: Any, value: float) -> Callable[[Raw], Raw]:
    """Return what gives some values of a tensor another one."""

    def change(tensor: Raw) -> Raw:
        values = numbers(tensor)
        values[rows] = value
        return stored(values, tensor)

    return change


def _two_units(tensor: Raw) -> Raw:
    data = bytearray(tensor.data)
    data[100] ^= 2  # in the last place
    return Raw(tensor.dtype, tensor.shape, bytes(data))


Q = f"{Q_PROJ}.weight"
EDITS = {
    "LT605": Edit(MERGED, changed={NORM: flipped}, verified=True),
    "LT605 by its bytes": Edit(MERGED, changed={NORM: flipped}, with_base=True),
    "LT607": Edit(MERGED, by=lambda folder: remerged(folder, lambda _, delta: 0 * delta), verified=True),
    "LT607 by its bytes": Edit(MERGED, by=lambda folder: remerged(folder, lambda _, delta: 0 * delta), with_base=True),
    "LT608": Edit(MERGED, changed={Q: _set(slice(8, 12), 0)}, verified=True),
    "LT608 one bit": Edit(MERGED, changed={Q: _two_units}, verified=True),
    "LT608 not a number": Edit(MERGED, changed={Q: _set((3, 4), np.nan)}, verified=True),
    "LT614": Edit(MERGED, tensors={SCORE: raw(1, 16, dtype="BF16")}, verified=True),
    "LT626": Edit("causal-llama/resized", changed={f"{PREFIX}{Q_PROJ}.lora_B.weight": _set(3, 0)}, verified=True),
    "LT609": Edit(MERGED, by=lambda folder: remerged(folder, lambda _name, delta: 2 * delta), verified=True),
    "LT610": Edit(MERGED, by=lambda folder: remerged(folder, lambda _name, delta: delta / 2), verified=True),
    "LT610 one tensor": Edit(
        MERGED,
        by=lambda folder: remerged(folder, lambda name, delta: 1.2 * delta if name == f"{Q_PROJ}.weight" else delta),
        verified=True,
    ),
    "LT610 subtracted": Edit(
        CAUSAL_MERGED, by=lambda folder: remerged(folder, lambda _name, delta: -delta), verified=True
    ),
    "LT611": Edit(
        MERGED,
        by=lambda folder: remerged(folder, lambda name, delta: delta.T if name == f"{Q_PROJ}.weight" else delta),
        verified=True,
    ),
    "LT606 by its bytes": Edit(MERGED, by=_one_forgotten, with_base=True),
}
enter(__name__, EDITS)
