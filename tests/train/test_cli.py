"""The commands as they are typed: TRL's options, workers by `accelerate launch`, and scripts under `guard`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_tool.checkpoints import open_checkpoint
from lora_tool.verification.validating import validate
from lora_tool_train import train_command
from tests.cli.calling import Caller
from tests.train.running import COMMON, QWEN2, pairs, texts, write_rows


def config(tmp_path: Path, **options: Any) -> Path:
    table = {
        **COMMON,
        "model_name_or_path": str(QWEN2),
        "dataset_name": str(write_rows(tmp_path / "data", pairs())),
        "output_dir": str(tmp_path / "out"),
        "cpu": True,
        **options,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in table.items() if value is not ...}))
    return path


def test_it_trains(tmp_path: Path, call: Caller) -> None:
    done = call("train", "reward", "--config", config(tmp_path), "--learning_rate", "2e-3")
    assert done.code == 0, done.err
    assert "set lora_task_type: SEQ_CLS" in done.err
    summary, wrote, following = done.out.splitlines()
    assert summary.startswith("trained reward: 4 steps, parameters moved by 0.")
    assert summary.endswith(", no findings")
    assert wrote == f"wrote {tmp_path / 'out'}"
    assert following == f"next: lora-tool merge {tmp_path / 'out'}"
    assert not validate(open_checkpoint(tmp_path / "out"), base=QWEN2, task="reward", deep=True).findings


@pytest.mark.parametrize(
    ("options", "words", "code", "said"),
    [
        ({}, ["--lora_task_type", "CAUSAL_LM"], 1, "error: training did not start: task-type: is CAUSAL_LM"),
        ({}, ["--lora_rr", "8"], 2, "did you mean `lora_r`?"),
        ({"dataset_name": ...}, [], 2, "no data is given"),
        ({"model_name_or_path": ...}, [], 2, "no model is given"),
        ({}, ["--resume", "nowhere"], 3, "nowhere: cannot be resumed from: no such folder"),
    ],
)
def test_a_run_that_cannot_end_well_starts_no_worker(
    tmp_path: Path, call: Caller, options: dict[str, Any], words: list[str], code: int, said: str
) -> None:
    done = call("train", "reward", "--config", config(tmp_path, **options), *words)
    assert done.code == code
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_without_the_extra_there_is_one_message(tmp_path: Path, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "PACKAGES", ("torch", "a_package_that_is_not_there"))
    done = call("train", "reward", "--config", config(tmp_path))
    assert done.code == 3
    error, hint = done.err.splitlines()
    assert error == "error: a_package_that_is_not_there is not installed"
    assert "[train]'" in hint


def test_an_error_of_trls_is_one_line(tmp_path: Path, call: Caller) -> None:
    done = call("train", "sft", "--config", config(tmp_path, dataset_name=str(tmp_path / "nowhere")), "--json")
    assert (done.code, done.json["status"]) == (3, "failed")
    assert "Traceback" not in done.err
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "nowhere" in error
    assert done.json["hint"].startswith("dataset_name: ")


def test_a_worker_that_is_killed_is_a_failure(tmp_path: Path, call: Caller) -> None:
    (tmp_path / "killing.py").write_text("import os\n\ndef score(completions, **_):\n    os._exit(9)\n")
    options = {"reward_funcs": ["killing.score"], "num_generations": 4, "max_completion_length": 4}
    path = config(tmp_path, **options, env={"PYTHONPATH": str(tmp_path)})
    done = call("train", "grpo", "--config", path)
    assert done.code == 3
    assert "error: training ended with exit code" in done.err
    assert "--resume auto" in done.err


def test_ctrl_c_ends_every_process_and_leaves_nothing_finished(tmp_path: Path) -> None:
    path = config(tmp_path, max_steps=100_000, save_strategy="steps", save_steps=1, save_total_limit=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_tool", "train", "reward", "--config", str(path)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    limit = time.monotonic() + 600
    while not list(tmp_path.glob("out/checkpoint-*")) and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.2)
    assert list(tmp_path.glob("out/checkpoint-*"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert not list((tmp_path / "out").glob("*.safetensors"))
    saved = sorted(tmp_path.glob("out/checkpoint-*"))
    time.sleep(1)
    assert sorted(tmp_path.glob("out/checkpoint-*")) == saved


def lora_tool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    typed = [sys.executable, "-m", "lora_tool", *map(str, words)]
    return subprocess.run(typed, capture_output=True, text=True, check=False, env=environment, timeout=500)


PLAIN = """
import peft, torch, transformers

base = transformers.AutoModelForCausalLM.from_pretrained({base!r})
model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM"))
rows = [{{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)}}] * 8
args = transformers.TrainingArguments({out!r}, max_steps=2, use_cpu=True, learning_rate={rate}, save_strategy="no")
trainer = transformers.Trainer(model, args, train_dataset=rows)
trainer.train()
trainer.save_model()
print("saved")
"""
OF_TRL = """
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
args = SFTConfig({out!r}, max_steps=2, use_cpu=True, bf16=False, report_to="none", learning_rate={rate}, save_strategy="no")
data = load_dataset({data!r}, split="train")
trainer = SFTTrainer({base!r}, args, train_dataset=data, peft_config=LoraConfig(task_type="CAUSAL_LM"))
trainer.train()
trainer.save_model()
print("saved")
"""


@pytest.mark.parametrize(("text", "rate", "code"), [(PLAIN, 1e-3, 0), (OF_TRL, 0.0, 1)], ids=["plain", "TRL"])
def test_guard_around_a_script(tmp_path: Path, text: str, rate: float, code: int) -> None:
    data = write_rows(tmp_path / "data", texts())
    script = tmp_path / "script.py"
    script.write_text(text.format(out=str(tmp_path / "out"), data=str(data), base=str(QWEN2), rate=rate))
    done = lora_tool("guard", "--", sys.executable, str(script))
    assert done.returncode == code, done.stderr
    assert done.stdout.endswith("saved\n") is (code == 0)  # stdout is the script's own, and nothing of ours
    assert ("guarded" in done.stderr) is (code == 0)
    assert done.stderr.count("never-moved: none of") == code  # once, whoever stops
    assert "Traceback" not in done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() is (code == 0)


def test_guard_says_when_it_guarded_nothing(call: Caller) -> None:
    done = call("guard", "--", sys.executable, "-c", "pass")
    assert done.code == 3
    assert "created no HF Trainer" in done.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--", "no-such-command"), 3),
        (("--", sys.executable, "-c", "raise SystemExit(7)"), 7),
        (("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), 137),
    ],
)
def test_guard_passes_on_what_fails(call: Caller, words: tuple[str, ...], code: int) -> None:
    done = call("guard", *words)
    assert done.code == code
    assert done.err.splitlines()[0].startswith("error: ")


def test_guard_reports_as_json(call: Caller) -> None:
    done = call("guard", "--json", "--", sys.executable, "-c", "pass")
    assert done.code == 3
    assert json.loads(done.out.partition("\n}\n")[0] + "}")["status"] == "unguarded"
    done = call("guard", "--ignore", "no-margn", "--", "true")
    assert (done.code, "unknown guard 'no-margn'" in done.err) == (2, True)
