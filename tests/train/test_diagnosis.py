"""The table of causes, and when a run is given up."""

from __future__ import annotations

from typing import Any

import pytest

from lora_tool_train.diagnosis import SignalTracker
from lora_tool_train.methods import METHODS

GRPO = METHODS["grpo"]
LEARNING = {"loss": 1e-8, "grad_norm": 0.2, "reward": 1.0, "reward_std": 0.4, "frac_reward_zero_std": 0.0}
CONSTANT = {"loss": 0.0, "grad_norm": 0.0, "reward": 1.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0}
NONE = {"loss": 0.0, "grad_norm": 0.0, "reward": None, "reward_std": None, "frac_reward_zero_std": 1.0}
CANCELS = {**CONSTANT, "rewards/a/std": 0.5, "rewards/b/std": 0.5}
NAN = float("nan")
FROZEN = {**LEARNING, "grad_norm": 0.0}
CLIPPED = {**FROZEN, "completions/clipped_ratio": 1.0}


@pytest.mark.parametrize(
    ("logs", "masked", "code"),
    [
        (LEARNING, False, None),
        ({**LEARNING, "completions/clipped_ratio": 1.0}, True, None),
        (CONSTANT, False, "reward-constant"),
        ({**CONSTANT, "grad_norm": 0.01}, False, "reward-constant"),  # a KL term alone moves it
        ({**CONSTANT, "reward_std": 0.5, "rewards/a/std": 0.5}, False, "reward-constant"),  # one level per prompt
        ({**CONSTANT, "rewards/a/std": 0.5}, False, "reward-cancels"),  # a weight of 0, or one function twice
        (CANCELS, False, "reward-cancels"),
        (NONE, False, "reward-none"),
        ({**NONE, "reward": float("nan")}, False, "reward-none"),
        ({**FROZEN, "reward": float("inf"), "rewards/a/mean": float("inf")}, False, "reward-infinite"),
        ({**LEARNING, "reward": float("inf"), "rewards/a/mean": float("inf")}, False, None),  # other groups still teach
        (CLIPPED, True, "all-masked"),
        (CLIPPED, False, "no-gradient"),
        (FROZEN, True, "no-gradient"),
        ({**LEARNING, "frac_reward_zero_std": 0.9}, False, None),
    ],
)
def test_grpo_table(logs: dict[str, Any], masked: bool, code: str | None) -> None:
    cause = SignalTracker(method=GRPO, mask_truncated=masked).cause(logs)
    assert (cause.code if cause else None) == code


@pytest.mark.parametrize(
    ("logs", "code"),
    [
        ({"loss": 0.0, "grad_norm": float("nan")}, "nan-gradients"),
        ({"loss": 1.0, "grad_norm": float("inf")}, "nan-gradients"),
        ({"loss": NAN, "grad_norm": 0.5}, None),  # one of its steps had no label
        ({"loss": NAN, "grad_norm": 0.0}, None),
        ({"loss": 0.0, "grad_norm": 0.2}, None),
        ({"eval_loss": NAN}, None),
    ],
)
def test_what_is_not_finite_stops_at_once(logs: dict[str, Any], code: str | None) -> None:
    cause = SignalTracker(method=GRPO, window=1000).observe(1, logs)
    assert (cause.code if cause else None) == code


def test_a_run_is_given_up_after_the_window_and_not_before() -> None:
    watch = SignalTracker(method=GRPO, window=10)
    seen = [watch.observe(step, CONSTANT) for step in range(1, 11)]
    assert [cause.code if cause else None for cause in seen] == [None] * 9 + ["reward-constant"]


def test_a_reward_that_may_be_rare_is_waited_for() -> None:
    none_earned = {**CONSTANT, "reward": 0.0}
    watch = SignalTracker(method=GRPO, window=10, batch=8)
    seen = [watch.observe(step, none_earned) for step in range(1, 33)]
    assert [cause is not None for cause in seen] == [False] * 31 + [True]  # 256 completions
    wide = SignalTracker(method=GRPO, window=10, batch=512)
    assert [wide.observe(step, none_earned) is not None for step in range(1, 11)] == [False] * 9 + [True]


def test_one_log_of_many_steps_is_not_enough() -> None:
    watch = SignalTracker(method=GRPO, window=10)
    assert watch.observe(100, CONSTANT) is None
    assert watch.observe(200, CONSTANT) is not None


def test_a_run_that_has_learned_is_not_given_up_but_told_of() -> None:
    watch = SignalTracker(method=GRPO, window=3)
    assert watch.observe(1, LEARNING) is None
    assert all(watch.observe(step, CONSTANT) is None for step in range(2, 30))
    assert watch.verdict() is None
    assert watch.lost() == 1


def test_a_run_that_is_resumed_after_it_has_learned_is_not_given_up() -> None:
    watch = SignalTracker(method=GRPO, window=3)
    watch.remember([{**LEARNING, "step": 1}, {**CONSTANT, "step": 2}, {"eval_loss": 1.0, "step": 2}], 2)
    assert all(watch.observe(step, CONSTANT) is None for step in range(3, 10))
    assert (watch.verdict(), watch.lost()) == (None, 2)
    never = SignalTracker(method=GRPO, window=3)
    never.remember([{**CONSTANT, "step": 1}, {"loss": 0.0, "grad_norm": NAN, "step": 2}], 2)
    assert [never.observe(step, CONSTANT) is None for step in range(3, 6)] == [True, True, False]


@pytest.mark.parametrize(
    ("logs", "measured", "unlabelled", "code", "said"),
    [
        ({"loss": NAN, "grad_norm": 0.0}, 0.0, False, "no-gradient", "the loss is nan and the gradient 0: no row has"),
        ({"loss": 0.0, "grad_norm": 0.0}, 0.0, True, "no-gradient", "the loss is 0 and the gradient 0: no row has a"),
        ({"loss": 2.5, "grad_norm": 0.0}, 0.0, False, "no-gradient", "the loss is 2.5 and the gradient 0 (steps 1 to"),
        ({"loss": NAN}, None, False, "nan-loss", "loss is nan, and no gradient is measured or logged (steps 1 to 10)"),
        ({"loss": NAN, "grad_norm": 0.0}, 0.3, False, None, ""),  # the last of ten steps had no label
    ],
)
def test_what_was_measured_is_said_and_a_cause_only_where_it_was_seen(
    logs: dict[str, Any], measured: float | None, unlabelled: bool, code: str | None, said: str
) -> None:
    watch = SignalTracker(window=10, unlabelled=unlabelled)
    seen = [watch.observe(step, logs, measured) for step in range(1, 11)]
    assert seen[:9] == [None] * 9
    assert (seen[9].code if seen[9] else None) == code
    assert seen[9] is None or seen[9].message.startswith(said)


def test_a_short_run_is_judged_at_its_end() -> None:
    watch = SignalTracker(method=GRPO, window=10)
    watch.observe(1, CONSTANT)
    verdict = watch.verdict()
    assert verdict is not None
    assert verdict.code == "reward-constant"


def test_without_a_logged_norm_the_measured_one_counts() -> None:
    logs = {"loss": 1.0}
    assert SignalTracker(method=METHODS["sft"]).cause(logs, 0.5) is None
    assert SignalTracker(method=METHODS["sft"]).cause(logs) is None
    cause = SignalTracker(method=METHODS["sft"]).cause(logs, 0.0)
    assert cause is not None
    assert cause.code == "no-gradient"


@pytest.mark.parametrize(
    ("chosen", "rejected", "code"), [(-1.5, -1.5, "no-margin"), (-1.5, -1.6, None), (0.0, 0.0, None)]
)
def test_margins(chosen: float, rejected: float, code: str | None) -> None:
    logs = {"loss": 3.0, "grad_norm": 1.0, "rewards/chosen": chosen, "rewards/rejected": rejected}
    cause = SignalTracker(method=METHODS["cpo"]).cause({**logs, "rewards/margins": chosen - rejected})
    assert (cause.code if cause else None) == code
