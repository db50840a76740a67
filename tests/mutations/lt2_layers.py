"""LT2xx: the tensors of an adapter do not fit each other."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, FIXTURES, REWARD, RUN, Edit, breaks, enter


def _dora(folder: Path) -> None:
    with fields(folder) as config:
        config["use_dora"] = True
    with tensors(folder) as table:
        lengths = {name: tensor.shape[0] for name, tensor in table.items() if ".lora_B." in name}
        for name, rows in lengths.items():
            table[name.replace(".lora_B.weight", ".lora_magnitude_vector")] = raw(rows)


@breaks("LT204", CAUSAL)
def _swapped(folder: Path) -> None:
    with tensors(folder) as table:
        a, b = f"{places.DOWN_PROJ}.lora_A.weight", f"{places.DOWN_PROJ}.lora_B.weight"
        table[a], table[b] = table[b], table[a]


EDITS = {
    "LT201 nothing but its magnitude": Edit(
        CAUSAL, by=_dora, removed=["{Q_PROJ}.lora_A.weight", "{Q_PROJ}.lora_B.weight"]
    ),
    "LT202 magnitude as a column": Edit(
        CAUSAL, by=_dora, changed={"{Q_PROJ}.lora_magnitude_vector": lambda old: raw(*old.shape, 1)}
    ),
    "LT206": Edit(CAUSAL, changed={"*": edit.emptied}),
    "LT206 one pair": Edit(CAUSAL, changed={"{Q_PROJ}.lora_*.weight": edit.emptied}),
    "LT206 one factor": Edit(CAUSAL, changed={"{Q_PROJ}.lora_A.weight": edit.emptied}),
    "LT206 with the head": Edit(REWARD, changed={"*": edit.emptied}),
    "LT206 in a run": Edit(
        RUN,
        by=lambda folder: shutil.copytree(FIXTURES / "zero/stage3-reward/global_step2", folder / "global_step2"),
        written={"latest": "global_step2"},
        changed={"*": edit.emptied},
    ),
    "LT201": Edit(CAUSAL, removed=["{Q_PROJ}.lora_B.weight"]),
    "LT201 without A": Edit(REWARD, removed=["{Q_PROJ}.lora_A.weight"]),
    "LT202": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_B.weight": raw(16, 2)}),
    "LT202 flat": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_B.weight": raw(64)}),
    "LT202 magnitude": Edit(CAUSAL, by=_dora, tensors={"{Q_PROJ}.lora_magnitude_vector": raw(12)}),
    "LT203": Edit(CAUSAL, config={"r": 8}),
    "LT203 by pattern": Edit(CAUSAL, config={"rank_pattern": {}}),
    "LT204 everywhere": Edit(
        REWARD, renamed=lambda name: name.translate(str.maketrans("AB", "BA")) if ".lora_" in name else name
    ),
    "LT212": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.weight": raw(4, 16, dtype="I8")}),
    "LT212 head": Edit(REWARD, tensors={"{SCORE}": raw(1, 16, dtype="I8")}),
    "LT212 norm": Edit(
        CAUSAL, config={"modules_to_save": ["model.norm"]}, tensors={"{PREFIX}model.norm.weight": raw(16, dtype="I64")}
    ),
    "LT218": Edit(CAUSAL, config={"use_dora": True}),
    "LT218 magnitude without DoRA": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_magnitude_vector": raw(16)}),
    "LT218 bias without lora_bias": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_B.bias": raw(16)}),
    "LT218 lora_bias without bias": Edit(CAUSAL, config={"lora_bias": True}),
}
enter(__name__, EDITS)
