"""LT7xx: the training run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.checkpoint_edits import WEIGHTS, fields
from tests.mutations.registry import RUN, WHOLE_RUN, Edit, breaks, enter

NAN, INFINITE = float("nan"), float("inf")
GOOD = {"loss": 0.7, "grad_norm": 0.5}
SAME_REWARD = {"loss": 0.0, "grad_norm": 0.0, "reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
CLIPPED = {"loss": 0.0, "grad_norm": 0.2, "reward": 1.0, "completions/clipped_ratio": 1.0}
LOGS: Mapping[str, Sequence[Mapping[str, float]]] = {
    "LT701": [GOOD, {"loss": 0.6, "grad_norm": NAN}],
    "LT701 loss": [GOOD, *[{"loss": NAN, "grad_norm": NAN}] * 2],
    "LT701 recovered": [{"loss": NAN}, {"loss": 0.7}],
    "LT701 infinite gradients": [{"loss": 0.7, "grad_norm": INFINITE}, {"loss": 0.6, "grad_norm": INFINITE}],
    "LT701 evaluation": [GOOD, {"eval_loss": NAN}],
    "LT701 skipped by the scaler": [{"loss": 0.7, "grad_norm": INFINITE}, {"loss": 0.6, "grad_norm": 0.5}],
    "LT702": [GOOD, {"loss": 0.0, "grad_norm": NAN}],
    "LT702 in GRPO": [{"loss": 0.0, "grad_norm": norm, "reward": 1.0} for norm in (0.2, NAN)],
    "LT702 without norms": [{"loss": 0.7}, {"loss": 0.0}, {"loss": 0.0}],
    "LT703": [{"loss": 0.693, "grad_norm": 6e-8, "rewards/margins": 0.0}] * 3,
    "LT703 in GRPO": [SAME_REWARD] * 2,
    "LT703 towards the end": [{"loss": 4.6, "grad_norm": 0.2}, *[{"loss": 4.56, "grad_norm": 0.0}] * 3],
    "LT703 learning rate": [{**GOOD, "learning_rate": 0.0}] * 3,
    "LT704": [*({"loss": 2.0 - at / 20, "grad_norm": 1.0} for at in range(20)), *[{"loss": 9.8}] * 6],
    "LT704 short": [{"loss": 0.7}, {"loss": 0.6}, {"loss": 40.0}],
    "LT704 worse than at the beginning": [*({"loss": 8.0 - at / 4} for at in range(28)), *[{"loss": 9.0}] * 8],
    "LT707": [CLIPPED] * 3,
}
"""The log of a checkpoint, its steps counted from 1."""


def _history(entries: Sequence[Mapping[str, float]]) -> dict[str, object]:
    return {"log_history": [{"step": at, "epoch": at / 10, **entry} for at, entry in enumerate(entries, 1)]}


@breaks("LT705", WHOLE_RUN)
def _killed(folder: Path) -> None:
    with fields(folder / "checkpoint-4", "trainer_state.json") as state:
        state["max_steps"] = 100
        state["stateful_callbacks"] = {}


@breaks("LT705 on purpose", WHOLE_RUN, quiet=True)
def _early_stopping(folder: Path) -> None:
    with fields(folder / "checkpoint-4", "trainer_state.json") as state:
        state["max_steps"] = 100


@breaks("LT708", WHOLE_RUN)
def _stood_still(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-2" / WEIGHTS, folder / "checkpoint-4" / WEIGHTS)


enter(
    __name__,
    {
        name: Edit(
            RUN,
            file="trainer_state.json",
            config=_history(entries),
            quiet=name in ("LT701 skipped by the scaler", "LT707"),
        )
        for name, entries in LOGS.items()
    },
)
enter(
    __name__,
    {
        "LT706": Edit(RUN, file="trainer_state.json", config={"global_step": 4}),
        "LT709": Edit(RUN, gone=["trainer_state.json"]),
        "LT709 optimizer": Edit(RUN, written={"optimizer.pt": "PK"}),
    },
)
