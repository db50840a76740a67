"""Trap 2: GRPO's loss is near 0 in every healthy run. What tells is the gradient, and where it is missing, why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.train.running import LLAMA, Trainings, codes, overflowing, prompts

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


def grpo(train: Trainings, *rewards: str, method: str = "grpo", **options: Any) -> Any:
    settings = {"num_generations": 4, "max_completion_length": 8, "max_steps": 3, "gradient_checkpointing": False}
    functions = [f"{HERE}.{name}" for name in rewards]
    defaults = {"model_name_or_path": str(LLAMA), "rows": prompts(), "reward_funcs": functions}
    return train(method, **{**defaults, **settings, **options})


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_healthy_without_a_word_though_its_loss_is_nothing(train: Trainings, method: str) -> None:
    outcome = grpo(train, "varied", method=method)
    assert (outcome.status.value, outcome.findings) == ("done", ())
    assert outcome.facts["lora_modules"]["q_proj"] == 2
    assert any(note.startswith("LoRA on") for note in outcome.notes)


@pytest.mark.parametrize(
    ("rewards", "options", "code"),
    [
        (["constant"], {}, "reward-constant"),
        (["varied", "contrary"], {}, "reward-cancels"),
        (["nothing"], {}, "reward-none"),
        (["varied"], {"mask_truncated_completions": True, "generation_kwargs": {"min_new_tokens": 8}}, "all-masked"),
    ],
)
def test_runs_that_learn_nothing_are_told_apart(
    train: Trainings, rewards: list[str], options: dict[str, Any], code: str
) -> None:
    outcome = grpo(train, *rewards, **options)
    assert outcome.status.value == "stopped"
    assert codes(outcome) == {code}
    assert outcome.hint
    assert not list(train.output.glob("*.safetensors"))


def test_it_does_not_wait_for_the_end(train: Trainings) -> None:
    outcome = grpo(train, "constant", max_steps=50)
    assert (outcome.status.value, codes(outcome)) == ("stopped", {"reward-constant"})
    assert train.run is not None
    assert train.run.guard.trainer.state.global_step == 10


def test_one_that_cancels_under_weights_that_do_not_is_healthy(train: Trainings) -> None:
    outcome = grpo(train, "varied", "contrary", reward_weights=[1.0, 0.5])
    assert (outcome.status.value, outcome.findings) == ("done", ())


def test_warn_mode_goes_on(train: Trainings) -> None:
    outcome = train(
        "grpo",
        {"guard": {"mode": "warn"}},
        model_name_or_path=str(LLAMA),
        rows=prompts(),
        reward_funcs=[f"{HERE}.constant"],
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
    )
    assert "reward-constant" in codes(outcome, "warning")
    assert outcome.facts["steps"] == 2


def test_a_model_whose_logits_overflow_names_float16(train: Trainings) -> None:
    base = overflowing(train.folder / "base")
    outcome = grpo(train, "varied", model_name_or_path=str(base), dtype="float16")
    assert outcome.status.value == "stopped"
    assert codes(outcome) == {"fp16-weights", "nan-logits"}
    assert "float16" in outcome.error
    assert "dtype: auto" in outcome.hint


def test_its_twin_in_the_dtype_of_the_checkpoint_is_healthy(train: Trainings) -> None:
    base = overflowing(train.folder / "base")
    outcome = grpo(train, "varied", model_name_or_path=str(base), dtype="auto")
    assert (outcome.status.value, outcome.findings) == ("done", ())


def endless(completions: list[str], **_: Any) -> list[float]:
    return [float("inf")] + [0.0] * (len(completions) - 1)


def test_a_reward_that_is_infinite_is_stopped(train: Trainings) -> None:
    outcome = grpo(train, "endless")
    assert (outcome.status.value, codes(outcome)) == ("stopped", {"reward-infinite"})
    assert not list(train.output.glob("*.safetensors"))


def test_a_run_shorter_than_its_logging_is_judged_too(train: Trainings) -> None:
    assert codes(grpo(train, "constant", logging_steps=50)) == {"reward-constant"}
    outcome = grpo(train, "varied", logging_steps=50)
    assert (outcome.status.value, outcome.findings) == ("done", ())


def test_a_reward_model_without_a_head_is_refused(train: Trainings) -> None:
    outcome = grpo(train, reward_funcs=..., reward_model_name_or_path=str(LLAMA))
    assert (outcome.status.value, codes(outcome)) == ("refused", {"reward-head"})
