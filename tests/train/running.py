"""Training tiny models through the worker, in this process: what costs is importing TRL, not the steps."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from lora_tool.errors import TrainingStopped
from lora_tool.train.checks import static_findings, with_settings
from lora_tool.train.config import RunConfig, read_run_config
from lora_tool.train.job import TrainingJob, TrainingOutcome, TrainingStatus
from lora_tool.train.methods import METHODS
from lora_tool.train.worker import TrainingProcess

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
QWEN2 = FIXTURES / "reward-qwen2" / "base"
LLAMA = FIXTURES / "causal-llama" / "base"

COMMON: Mapping[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_strategy": "no",
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": "all-linear",
    "disable_tqdm": True,
    "seed": 3,
}

TINY: Mapping[str, Any] = {"vocab_size": 304, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def sums(count: int, seed: int = 0) -> Iterable[tuple[str, str, str]]:
    rng = random.Random(seed)
    for _ in range(count):
        a, b = rng.randrange(10), rng.randrange(10)
        yield f"What is {a} plus {b}?", f"The sum is {a + b}.", f"I guess it is {a + b + rng.randrange(1, 9)}."


def pairs(count: int = 24) -> list[dict[str, Any]]:
    return [{"prompt": ask, "chosen": right, "rejected": wrong} for ask, right, wrong in sums(count)]


def texts(count: int = 24) -> list[dict[str, Any]]:
    return [{"text": f"{ask} {right}"} for ask, right, _ in sums(count)]


def prompts(count: int = 24) -> list[dict[str, Any]]:
    return [{"prompt": ask} for ask, _, _ in sums(count)]


def labelled(count: int = 24) -> list[dict[str, Any]]:
    rows = []
    for at, (ask, right, wrong) in enumerate(sums(count)):
        rows.append({"prompt": ask, "completion": wrong if at % 2 else right, "label": at % 2 == 0})
    return rows


def write_rows(folder: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def edited(base: Path, to: Path, edit: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Copy a base and change its weights."""
    shutil.copytree(base, to)
    for path in to.glob("*.safetensors"):
        save_file({name: edit(name, tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return to


def overflowing(to: Path) -> Path:
    """Copy the Qwen2 base with an MLP whose activations pass 65504; bfloat16 holds them."""
    return edited(QWEN2, to, lambda name, tensor: tensor * 300 if ".mlp." in name else tensor)


def tiny_base(to: Path, config: hf.PretrainedConfig, tokenizer: Path = LLAMA) -> Path:
    """Write a random causal model with the fixtures' tokenizer."""
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(to)
    hf.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(to)
    return to


class Trainings:
    """Runs cases below one folder. Each call is one run of the worker in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.run: TrainingProcess | None = None

    def config(self, method: str, block: Mapping[str, Any] | None = None, /, **options: Any) -> RunConfig:
        self.count += 1
        place = self.folder / f"run-{self.count}"
        place.mkdir(parents=True)
        rows = options.pop("rows", None)
        if rows is not None:
            options["dataset_name"] = str(write_rows(place / "data", rows))
        table = {**COMMON, "output_dir": str(place / "out"), **options}
        path = place / "run.yaml"
        given = {name: value for name, value in table.items() if value is not ...}
        path.write_text(yaml.safe_dump({**given, **({"lora_tool": dict(block)} if block else {})}), encoding="utf-8")
        return read_run_config(METHODS[method], path, [])

    def __call__(
        self,
        method: str,
        block: Mapping[str, Any] | None = None,
        /,
        *,
        dry: Any = False,
        resume: Any = None,
        **options: Any,
    ) -> TrainingOutcome:
        run, _ = with_settings(self.config(method, block, **options))
        found = static_findings(run)
        if any(item.severity.value == "error" for item in found):
            return TrainingOutcome(status=TrainingStatus.REFUSED, findings=found)
        fresh_state()
        reported = tuple(item.code for item in found)
        resumed = None if resume is None else str(resume)
        job = TrainingJob(
            method=run.method, options=run.options, guard=run.guard, dry_run=dry, reported=reported, resume=resumed
        )
        self.run = TrainingProcess(job, main_process=True)
        try:
            outcome = self.run.whole()
        except TrainingStopped as stop:
            outcome = self.run.failed(stop)
        return replace(outcome, findings=(*found, *outcome.findings))

    @property
    def output(self) -> Path:
        return self.folder / f"run-{self.count}" / "out"


def fresh_state() -> None:
    """Let the next trainer choose its precision and device anew."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def codes(outcome: TrainingOutcome, severity: str | None = None) -> set[str]:
    return {item.code for item in outcome.findings if severity in (None, item.severity.value)}
