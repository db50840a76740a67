"""Trap 2: GRPO's loss is near 0 in every healthy run. What tells is the gradient, and where it is missing, why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.running import LLAMA, Trained, Trainings, overflowing, prompts

pytestmark = pytest.mark.filterwarnings("default")

HERE = "tests.train.test_grpo"


def varied(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text)) % 7) for text in completions]


def contrary(completions: list[str], **_: Any) -> list[float]:
    return [-value for value in varied(completions)]


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def nothing(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def grpo(train: Trainings, *rewards: str, method: str = "grpo", guard: Any = None, **options: Any) -> Trained:
    settings = {"num_generations": 4, "max_completion_length": 8, "max_steps": 3, "gradient_checkpointing": False}
    functions = [f"{HERE}.{name}" for name in rewards]
    defaults = {"model_name_or_path": str(LLAMA), "rows": prompts(), "reward_funcs": functions}
    return train(method, guard, **{**defaults, **settings, **options})


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_healthy_without_a_word_though_its_loss_is_nothing(train: Trainings, method: str) -> None:
    done = grpo(train, "varied", method=method)
    assert (done.status, done.report["findings"]) == ("done", [])
    assert done.report["facts"]["moved"] > 0


@pytest.mark.parametrize(
    ("rewards", "options", "code"),
    [
        (["constant"], {"max_steps": 50}, "reward-constant"),
        (["constant"], {"logging_steps": 50}, "reward-constant"),  # a run shorter than its logging
        (["varied", "contrary"], {}, "reward-cancels"),
        (["nothing"], {}, "reward-none"),
        (["endless"], {}, "reward-infinite"),
        (["varied"], {"mask_truncated_completions": True, "generation_kwargs": {"min_new_tokens": 8}}, "all-masked"),
    ],
)
def test_runs_that_learn_nothing_are_told_apart(
    train: Trainings, rewards: list[str], options: dict[str, Any], code: str
) -> None:
    done = grpo(train, *rewards, **options)
    assert (done.code, done.status, done.codes()) == (1, "stopped", {code})
    assert done.hint
    assert not list(train.output.glob("*.safetensors"))
    if options.get("max_steps"):  # it does not wait for the end
        assert done.report["findings"][0]["path"] == "step 10"


def test_one_that_cancels_under_weights_that_do_not_is_healthy(train: Trainings) -> None:
    done = grpo(train, "varied", "contrary", reward_weights=[1.0, 0.5])
    assert (done.status, done.report["findings"]) == ("done", [])


def test_warn_mode_goes_on(train: Trainings) -> None:
    done = grpo(train, "constant", guard={"mode": "warn"}, max_steps=2)
    assert "reward-constant" in done.codes("warning")
    assert (done.status, done.report["facts"]["steps"]) == ("bad-result", 2)  # every B is zero


def test_a_model_whose_logits_overflow_names_float16(train: Trainings) -> None:
    base = overflowing(train.folder / "base")
    done = grpo(train, "varied", model_name_or_path=str(base), dtype="float16")
    assert (done.code, done.status, done.codes()) == (1, "stopped", {"fp16-weights", "nan-logits"})
    assert "float16" in done.error
    assert "dtype: auto" in done.hint


def endless(completions: list[str], **_: Any) -> list[float]:
    return [float("inf")] + [0.0] * (len(completions) - 1)


def test_a_reward_model_without_a_head_is_refused(train: Trainings) -> None:
    done = grpo(train, reward_funcs=..., reward_model_name_or_path=str(LLAMA))
    assert (done.code, done.status, done.codes()) == (1, "refused", {"reward-head"})
