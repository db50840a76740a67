"""LT7xx: the training run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.checkpoint_edits import WEIGHTS, fields
from tests.mutations.registry import RUN, WHOLE_RUN, breaks

NAN = float("nan")


def _log(folder: Path, *entries: Mapping[str, float]) -> None:
    """Replace the log of a checkpoint, its steps counted from 1."""
    with fields(folder, "trainer_state.json") as state:
        state["log_history"] = [{"step": at, "epoch": at / 10, **entry} for at, entry in enumerate(entries, 1)]


@breaks("LT701", RUN)
def _gradient_nan(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": 0.6, "grad_norm": NAN})


@breaks("LT701 loss", RUN)
def _loss_nan(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": NAN, "grad_norm": NAN}, {"loss": NAN, "grad_norm": NAN})


@breaks("LT701 recovered", RUN)
def _loss_recovered(folder: Path) -> None:
    _log(folder, {"loss": NAN}, {"loss": 0.7})


@breaks("LT701 infinite gradients", RUN)
def _gradient_infinite(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": float("inf")}, {"loss": 0.6, "grad_norm": float("inf")})


@breaks("LT701 evaluation", RUN)
def _evaluation_nan(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"eval_loss": NAN})


@breaks("LT701 skipped by the scaler", RUN, quiet=True)
def _skipped_step(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": float("inf")}, {"loss": 0.6, "grad_norm": 0.5})


@breaks("LT702", RUN)
def _loss_masked(folder: Path) -> None:
    _log(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": 0.0, "grad_norm": NAN})


@breaks("LT702 in GRPO", RUN)
def _loss_masked_online(folder: Path) -> None:
    _log(folder, {"loss": 0.0, "grad_norm": 0.2, "reward": 1.0}, {"loss": 0.0, "grad_norm": NAN, "reward": 1.0})


@breaks("LT702 without norms", RUN)
def _loss_masked_without_norms(folder: Path) -> None:
    _log(folder, {"loss": 0.7}, {"loss": 0.0}, {"loss": 0.0})


@breaks("LT703", RUN)
def _no_gradient(folder: Path) -> None:
    _log(folder, *({"loss": 0.693, "grad_norm": 6e-8, "rewards/margins": 0.0} for _ in range(3)))


@breaks("LT703 in GRPO", RUN)
def _constant_reward(folder: Path) -> None:
    entry = {"loss": 0.0, "grad_norm": 0.0, "reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
    _log(folder, entry, entry)


@breaks("LT703 towards the end", RUN)
def _saturated(folder: Path) -> None:
    _log(folder, {"loss": 4.6, "grad_norm": 0.2}, *({"loss": 4.56, "grad_norm": 0.0} for _ in range(3)))


@breaks("LT703 learning rate", RUN)
def _no_learning_rate(folder: Path) -> None:
    _log(folder, *({"loss": 0.7, "grad_norm": 0.5, "learning_rate": 0.0} for _ in range(3)))


@breaks("LT704", RUN)
def _diverged(folder: Path) -> None:
    _log(folder, *({"loss": 2.0 - at / 20, "grad_norm": 1.0} for at in range(20)), *({"loss": 9.8} for _ in range(6)))


@breaks("LT704 short", RUN)
def _diverged_in_a_short_log(folder: Path) -> None:
    _log(folder, {"loss": 0.7}, {"loss": 0.6}, {"loss": 40.0})


@breaks("LT704 worse than at the beginning", RUN)
def _diverged_from_its_best(folder: Path) -> None:
    _log(folder, *({"loss": 8.0 - at / 4} for at in range(28)), *({"loss": 9.0} for _ in range(8)))


@breaks("LT705", WHOLE_RUN)
def _killed(folder: Path) -> None:
    with fields(folder / "checkpoint-4", "trainer_state.json") as state:
        state["max_steps"] = 100
        state["stateful_callbacks"] = {}


@breaks("LT705 on purpose", WHOLE_RUN, quiet=True)
def _early_stopping(folder: Path) -> None:
    with fields(folder / "checkpoint-4", "trainer_state.json") as state:
        state["max_steps"] = 100


@breaks("LT706", RUN)
def _state_of_another_step(folder: Path) -> None:
    with fields(folder, "trainer_state.json") as state:
        state["global_step"] = 4


@breaks("LT707", RUN, quiet=True)
def _never_ends(folder: Path) -> None:
    _log(folder, *({"loss": 0.0, "grad_norm": 0.2, "reward": 1.0, "completions/clipped_ratio": 1.0} for _ in range(3)))


@breaks("LT708", WHOLE_RUN)
def _stood_still(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-2" / WEIGHTS, folder / "checkpoint-4" / WEIGHTS)


@breaks("LT709", RUN)
def _killed_while_saving(folder: Path) -> None:
    (folder / "trainer_state.json").unlink()


@breaks("LT709 optimizer", RUN)
def _optimizer_cut_off(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"PK")
