"""Runs that are healthy although they look ill, which checkpoint of a run is the best, and files that lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lora_tool.core.report import Report, Severity
from lora_tool.core.report.findings import Run
from tests import checkpoint_edits as edit
from tests.judging import codes, judge, lines
from tests.mutations import FIXTURES

INF, NAN = float("inf"), float("nan")
TRAINING = ["LT7"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "reward-run", tmp_path / "run"))


def logged(folder: Path, *entries: Mapping[str, float], **state: Any) -> None:
    with edit.fields(folder, "trainer_state.json") as raw:
        raw["log_history"] = [{"step": at, **entry} for at, entry in enumerate(entries, 1)]
        raw.update(state)


def grpo(**changes: float) -> dict[str, float]:
    return {"loss": -7e-9, "grad_norm": 0.2, "reward": 1.0, "reward_std": 0.4, "frac_reward_zero_std": 0.0, **changes}


HEALTHY: Mapping[str, Sequence[Mapping[str, float]]] = {
    "GRPO, whose loss is 0": [grpo(), grpo(loss=1e-8), grpo(loss=0.0)],
    "GRPO with steps of equal rewards": [grpo(grad_norm=0.0, reward_std=0.0, frac_reward_zero_std=1.0), grpo()],
    "a gradient that was not logged, with a loss that falls": [
        {"loss": 2.0 - at / 10, "grad_norm": 0.0} for at in range(9)
    ],
    "a gradient that is not logged any more": [{"loss": 2.0, "grad_norm": 0.5}]
    + [{"loss": 1.9 - at / 10, "grad_norm": 0.0} for at in range(9)],
    "GRPO that has solved its task": [grpo(), *(grpo(grad_norm=0.0, reward_std=0.0, frac_reward_zero_std=1.0),) * 5],
    "GRPO whose loss grows": [grpo(loss=1e-8 * 10**at) for at in range(8)],
    "GRPO with completions cut off": [grpo(**{"completions/clipped_ratio": 1.0}) for _ in range(3)],
    "GRPO without logged norms": [
        {"loss": 0.3, "reward": 1.0},
        {"loss": 0.0, "reward": 1.0},
        {"loss": 0.0, "reward": 1.0},
    ],
    "fp16, whose scaler skips its first steps": [{"loss": 0.7, "grad_norm": INF}, {"loss": 0.7, "grad_norm": NAN}]
    + [{"loss": 0.6, "grad_norm": 0.5}] * 3,
    "CPO, which begins at 22": [{"loss": 22.0 - at, "grad_norm": 9.0} for at in range(6)],
    "a noisy loss": [{"loss": 0.5 + (at % 5) * 0.6, "grad_norm": 1.0} for at in range(40)],
    "two steps, one of them unlucky": [{"loss": 0.2}, {"loss": 3.0}],
    "one example at a time": [{"loss": loss} for loss in (0.5, 2.1, 0.7, 3.0)],
    "a loss that rounds to 0": [{"loss": loss} for loss in (0.3, 0.02, 0.0004, 0.0001, 0.0, 0.0)],
    "a loss of 0 with a gradient": [{"loss": 0.4, "grad_norm": 1.0}, {"loss": 0.0, "grad_norm": 1e-4}],
    "a loss below 0": [{"loss": -0.1 * at, "grad_norm": 1.0} for at in range(30)],
    "warmup, whose first rate is 0": [
        {"loss": 0.7, "grad_norm": 0.5, "learning_rate": 0.0},
        {"loss": 0.6, "learning_rate": 1e-4},
    ],
    "one step": [{"loss": 0.7, "grad_norm": 0.5, "learning_rate": 0.0}],
    "nothing logged": [],
    "evaluated only": [{"eval_loss": 0.5}],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_silent(name: str, run: Path) -> None:
    folder = run / "checkpoint-2"
    logged(folder, *HEALTHY[name])
    assert lines(judge(folder, select=TRAINING)) == []


def test_a_last_gradient_that_overflowed_is_a_warning(run: Path) -> None:
    folder = run / "checkpoint-2"
    logged(folder, {"loss": 0.7, "grad_norm": 0.5}, {"loss": 0.6, "grad_norm": INF})
    assert codes(judge(folder, select=TRAINING)) == {"LT701"}
    assert codes(judge(folder, select=TRAINING), Severity.ERROR) == set()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (grpo(grad_norm=0.0, reward_std=0.0), "the same reward"),
        (grpo(grad_norm=0.0, **{"completions/clipped_ratio": 1.0}), "cut off"),
        ({"loss": 0.69, "grad_norm": 6e-8, "rewards/margins": 0.0}, "do not differ"),
        ({"loss": 0.69, "grad_norm": 0.0}, "frozen"),
    ],
)
def test_why_there_was_no_gradient_is_said(entry: Mapping[str, float], why: str, run: Path) -> None:
    folder = run / "checkpoint-2"
    logged(folder, entry, entry)
    (finding,) = judge(folder, select=TRAINING).at_least(Severity.ERROR)
    assert why in finding.message


@pytest.mark.parametrize(
    "history",
    [None, {}, "x", [None, 1, [], {"loss": "0.7"}, {"loss": None}, {"loss": True}, {"loss": [1]}], [{"loss": 10**400}]],
)
def test_a_log_of_something_else_is_no_crash(history: object, run: Path) -> None:
    path = run / "checkpoint-2" / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 2, "max_steps": "many", "best_metric": {}, "log_history": history}))
    assert codes(judge(run / "checkpoint-2", select=TRAINING)) <= {"LT701"}


# the table of a run


def table(report: Report) -> Run:
    (run,) = report.runs
    return run


def best(run: Path, **options: Any) -> str | None:
    found = table(judge(run, **options)).best
    return Path(found).name if found else None


def test_every_checkpoint_is_in_the_table_by_step(run: Path) -> None:
    shutil.copytree(run / "checkpoint-4", run / "checkpoint-10")
    with edit.fields(run / "checkpoint-10", "trainer_state.json") as state:
        state["global_step"] = 10
    rows = table(judge(run)).checkpoints
    assert [(row.name, row.step) for row in rows] == [("checkpoint-2", 2), ("checkpoint-4", 4), ("checkpoint-10", 10)]
    assert rows[0].loss == pytest.approx(0.636178731918335)
    assert rows[0].nbytes == sum(path.stat().st_size for path in (run / "checkpoint-2").rglob("*") if path.is_file())


def test_without_evaluation_the_latest_that_is_whole_is_best(run: Path) -> None:
    assert best(run) == "checkpoint-4"
    (run / "checkpoint-4" / edit.WEIGHTS).unlink()
    report = judge(run)
    assert best(run) == "checkpoint-2"
    broken = table(report).checkpoints[1]
    assert (broken.verdict, broken.codes) == ("broken", ("LT115",))


def test_no_checkpoint_is_best_where_none_is_whole(run: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-4"):
        (run / name / edit.WEIGHTS).unlink()
    assert best(run) is None
    shutil.rmtree(run / "checkpoint-2")
    (run / "checkpoint-2").mkdir()
    assert [row.verdict for row in table(judge(run)).checkpoints] == ["broken", "broken"]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("eval_loss", (0.4, 0.5), "checkpoint-2"),
        ("eval_loss", (0.5, 0.4), "checkpoint-4"),
        ("eval_loss", (0.4, NAN), "checkpoint-2"),
        ("eval_loss", (0.4, 0.4), "checkpoint-4"),
        ("eval_accuracy", (0.9, 0.8), "checkpoint-2"),
        ("eval_rewards/margins", (0.1, 0.8), "checkpoint-4"),
    ],
)
def test_the_evaluated_metric_decides(metric: str, values: tuple[float, float], expected: str, run: Path) -> None:
    entries = [{"step": step, metric: value, "eval_runtime": 1.0} for step, value in zip((2, 4), values, strict=True)]
    for at, name in enumerate(("checkpoint-2", "checkpoint-4"), 1):
        logged(run / name, *entries[:at])
    found = table(judge(run, ignore=["LT701"]))
    assert found.metric == metric
    assert Path(str(found.best)).name == expected
    assert metric in str(found.why_best)


def test_what_the_trainer_calls_best_names_metric_and_direction(run: Path) -> None:
    entries = [{"step": 2, "eval_loss": 0.5, "eval_score": 3.0}, {"step": 4, "eval_loss": 0.4, "eval_score": 7.0}]
    for at, name in enumerate(("checkpoint-2", "checkpoint-4"), 1):
        logged(run / name, *entries[:at], best_metric=3.0, best_global_step=2)
    found = table(judge(run))
    assert (found.metric, found.why_best) == ("eval_score", "lowest eval_score, 3")


@pytest.mark.parametrize("named", [{"best_global_step": 2}, {"best_model_checkpoint": "/elsewhere/run/checkpoint-2"}])
def test_of_two_that_are_equal_the_one_is_best_that_the_trainer_names(named: dict[str, Any], run: Path) -> None:
    entries = [{"step": 2, "eval_loss": 0.4}, {"step": 4, "eval_loss": 0.4}]
    for at, name in enumerate(("checkpoint-2", "checkpoint-4"), 1):
        logged(run / name, *entries[:at], best_metric=0.4, **named)
    assert best(run) == "checkpoint-2"


def test_finished_weights_are_a_row_of_their_run(run: Path) -> None:
    for path in (run / "checkpoint-4").iterdir():
        shutil.copy(path, run)
    (run / "trainer_state.json").unlink()
    assert judge(run).runs == ()
    report = judge(run, checkpoints=True)
    assert lines(report) == []
    assert [row.name for row in table(report).checkpoints] == ["checkpoint-2", "checkpoint-4", "(finished)"]
    assert table(report).best == str(run)
    assert len(report.subjects) == 3


def test_a_selection_goes_for_folders_that_cannot_be_opened_too(run: Path) -> None:
    shutil.rmtree(run / "checkpoint-2")
    (run / "checkpoint-2").mkdir()
    assert codes(judge(run)) == {"LT115"}
    assert codes(judge(run, ignore=["LT115"])) == set()
