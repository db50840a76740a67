"""Runs of the real HF Trainer, healthy and doomed: what it writes is what LT7xx must see, and nothing else."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from lora_tool.core.report import Report, Severity
from tests.judging import codes, judge, lines
from tests.oracle.tiny import tiny_model


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int = 16) -> None:
        self.rows = torch.randint(3, 90, (count, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


class Killed(TrainerCallback):  # type: ignore[misc] # transformers is not typed here
    """Ends the process of training in the middle of a step, as a job's time limit does."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - its signature
        if state.global_step == 5:
            raise KeyboardInterrupt


TARGETS = ("q_proj", "down_proj", "up_proj")


def train(
    root: Path,
    *callbacks: TrainerCallback,
    evaluate: bool = False,
    targets: tuple[str, ...] = TARGETS,
    **options: Any,
) -> Path:
    """Run the Trainer on a tiny Llama with LoRA; return its output folder."""
    torch.manual_seed(0)
    model = tiny_model("llama", "causal-lm")
    model.save_pretrained(root / "base")
    model.name_or_path = str(root / "base")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(targets)))
    arguments = TrainingArguments(
        output_dir=str(root / "run"),
        **{
            "max_steps": 6,
            "save_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "disable_tqdm": True,
            "use_cpu": True,
            "report_to": "none",
            **({"eval_strategy": "steps", "eval_steps": 2} if evaluate else {}),
            **options,
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            adapted,
            arguments,
            train_dataset=Rows(),
            eval_dataset=Rows(4) if evaluate else None,
            callbacks=list(callbacks),
        )
        try:
            trainer.train()
        except KeyboardInterrupt:
            assert callbacks
    return root / "run"


def judged(run: Path) -> Report:
    return judge(run, base=run.parent / "base")


def test_a_healthy_run_is_silent_and_its_best_checkpoint_is_the_trainers(tmp_path: Path) -> None:
    run = train(tmp_path, evaluate=True, metric_for_best_model="eval_loss")
    report = judged(run)
    assert lines(report) == []
    (table,) = report.runs
    assert table.metric == "eval_loss"
    assert [row.step for row in table.checkpoints] == [2, 4, 6]
    losses = {row.metric: row.path for row in table.checkpoints}
    assert None not in losses
    assert table.best == losses[min(loss for loss in losses if loss is not None)]


def test_a_run_whose_loss_is_nan_looks_like_zero_in_the_log(tmp_path: Path) -> None:
    run = train(tmp_path, learning_rate=1e30, max_grad_norm=0.0)
    report = judged(run)
    assert {"LT209", "LT702"} <= codes(report, Severity.ERROR)
    assert report.runs[0].best is None


def test_a_run_that_learned_nothing(tmp_path: Path) -> None:
    run = train(tmp_path, learning_rate=0.0)
    assert codes(judged(run)) == {"LT208", "LT703", "LT708"}


def test_a_run_that_diverged(tmp_path: Path) -> None:
    run = train(tmp_path, targets=("lm_head",), learning_rate=1e2, max_steps=30, save_steps=30)
    assert "LT704" in codes(judge(run / "checkpoint-30", select=["LT7"]))


@pytest.mark.parametrize("weights_at_the_end", [False, True])
def test_a_run_that_was_killed(weights_at_the_end: bool, tmp_path: Path) -> None:
    run = train(tmp_path, Killed())
    if weights_at_the_end:
        for path in (run / "checkpoint-4").glob("adapter_*"):
            (run / path.name).write_bytes(path.read_bytes())
    report = judge(run, checkpoints=True)
    assert codes(report) == (set() if weights_at_the_end else {"LT705"})


def test_early_stopping_is_noted_only(tmp_path: Path) -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
    run = train(
        tmp_path, stopping, evaluate=True, max_steps=20, metric_for_best_model="eval_loss", load_best_model_at_end=True
    )
    report = judged(run)
    assert lines(report) == []
    assert "LT705" in codes(report, Severity.INFO)
