"""Training tiny models with TRL in this process: importing TRL takes the time, not the steps."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers as hf
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file, save_file

from lora_tool_train import experimental, guard, running
from lora_tool_train.config import trl_parser
from lora_tool_train.job import FOLDER_VARIABLE, TrainingJob, TrainingOutcome, read_outcomes, write_job
from lora_tool_train.logbook import this_process
from lora_tool_train.methods import METHODS
from tests.cli.calling import Caller

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
    """Runs cases below one folder: the command `train`, with TRL's script run in this process instead of a worker."""

    def __init__(self, folder: Path, call: Caller) -> None:
        self.folder = folder
        self.call = call
        self.count = 0

    def __call__(
        self, method: str, guard: Mapping[str, Any] | None = None, /, *, words: Any = (), **options: Any
    ) -> Trained:
        self.count += 1
        place = self.folder / f"run-{self.count}"
        place.mkdir(parents=True)
        rows = options.pop("rows", None)
        if rows is not None:
            options["dataset_name"] = str(write_rows(place / "data", rows))
        table = {**COMMON, "output_dir": str(self.output), **options}
        given = {name: value for name, value in table.items() if value is not ...}
        block = {"lora_tool": {"guard": dict(guard)}} if guard else {}
        (place / "run.yaml").write_text(yaml.safe_dump({**given, **block}), encoding="utf-8")
        with mock.patch.object(running, "run_guarded", run_here):
            done = self.call("train", method, "--config", place / "run.yaml", "--json", *words)
        report = done.out[done.out.index('{\n  "schema_version"') :]  # TRL's script has printed in this process, too
        return Trained(done.code, done.err, json.loads(report))

    @property
    def output(self) -> Path:
        return self.folder / f"run-{self.count}" / "out"


class Trained(NamedTuple):
    code: int
    err: str
    report: Any

    @property
    def status(self) -> str:
        return str(self.report["status"])

    @property
    def error(self) -> str:
        return str(self.report["error"])

    @property
    def hint(self) -> str:
        return str(self.report["hint"])

    def codes(self, severity: str | None = None) -> set[str]:
        return {item["code"] for item in self.report["findings"] if severity in (None, item["severity"])}


def run_here(words: Sequence[str], job: TrainingJob, **_: Any) -> tuple[int, list[TrainingOutcome]]:
    """Run TRL's script as a guarded process does, in this process."""
    module, *arguments = " ".join(words).rpartition(" -m ")[2].split()
    with tempfile.TemporaryDirectory() as name, attached(Path(name), job):
        try:
            if module == "lora_tool_train.experimental":
                method = METHODS[arguments.pop(0)]
                experimental.run(method, trl_parser(method).parse_args_and_config(arguments))
            else:
                trl = importlib.import_module(module)
                trl.main(*trl.make_parser().parse_args_and_config(arguments))
        except Exception as error:  # noqa: BLE001 - what Python's excepthook gets
            code = 1
            this_process().ended_by(error)
        else:
            code = 0
        guard.write_done()
        return code, read_outcomes(Path(name))


@contextmanager
def attached(folder: Path, job: TrainingJob) -> Iterator[None]:
    """Attach the guard as a guarded process has it; the parent reads `folder`."""
    AcceleratorState._reset_state(reset_partial_state=True)  # the next trainer chooses its precision and device anew
    GradientState._reset_state()
    PartialState._reset_state()
    write_job(job, folder)
    this_process.cache_clear()
    hf.trainer.DEFAULT_CALLBACKS.append(guard.Guard)
    try:
        with mock.patch.dict(os.environ, {FOLDER_VARIABLE: str(folder)}):
            yield
    finally:
        hf.trainer.DEFAULT_CALLBACKS.remove(guard.Guard)
        this_process.cache_clear()
