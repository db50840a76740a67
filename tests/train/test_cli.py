"""The commands as they are typed: TRL's options, workers by `accelerate launch`, and scripts under `guard`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_tool.checkpoints import open_checkpoint
from lora_tool.verification.validating import validate
from lora_tool_train import launch, running, train_command
from lora_tool_train.job import TrainingOutcome, TrainingStatus
from tests.cli.calling import Caller
from tests.train.running import COMMON, QWEN2, pairs, run_here, write_rows


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


@pytest.mark.filterwarnings("default")
def test_it_trains(tmp_path: Path, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "run_guarded", run_here)
    done = call("train", "reward", "--config", config(tmp_path), "--learning_rate", "2e-3")
    assert done.code == 0, done.err
    assert "set lora_task_type: SEQ_CLS" in done.err
    summary, wrote, following = done.out.splitlines()[-3:]  # TRL's script has printed in this process, too
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
        ({"lr_scheduler_type": "cosinus"}, [], 2, "did you mean `cosine`?"),
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


@pytest.mark.parametrize(
    ("name", "way"), [("distillation", "trl distillation --config run.yaml"), ("gkd", "python SCRIPT")]
)
def test_another_method_of_trl_runs_under_the_guard(name: str, way: str, call: Caller) -> None:
    done = call("train", name, "--config", "run.yaml")
    assert done.code == 2
    assert f"train has no {name}: expected one of reward, sft" in done.err
    assert f"lora-tool guard -- {way}" in done.err


def test_without_the_extra_there_is_one_message(tmp_path: Path, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "PACKAGES", ("torch", "a_package_that_is_not_there"))
    done = call("train", "reward", "--config", config(tmp_path))
    assert done.code == 3
    error, hint = done.err.splitlines()
    assert error == "error: a_package_that_is_not_there is not installed"
    assert "[train]'" in hint


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise OSError(28, 'No space left on device')", ["error: OSError: [Errno 28] No space left", "hint: "]),
        ("import os\nos._exit(9)", ["error: training ended with exit code", "--resume auto"]),
    ],
    ids=["an error", "killed"],
)
def test_a_worker_that_ends_badly_is_one_error(tmp_path: Path, call: Caller, script: str, said: list[str]) -> None:
    """A script of ours in the place of TRL's, which `accelerate launch` starts: importing TRL takes the time."""
    for name in ("trl/__init__.py", "trl/scripts/__init__.py", "trl/scripts/sft.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(script if name.endswith("sft.py") else "")
    done = call("train", "sft", "--config", config(tmp_path, env={"PYTHONPATH": str(tmp_path)}))
    assert done.code == 3
    assert "Traceback" not in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error: ")]) == 1
    for words in said:
        assert words in done.err


def test_ctrl_c_ends_every_process_and_leaves_nothing_finished(tmp_path: Path, call: Caller) -> None:
    path = config(tmp_path, max_steps=100_000, save_strategy="steps", save_steps=1, save_total_limit=1)
    ended = threading.Event()

    def interrupt() -> None:
        while not list(tmp_path.glob("out/checkpoint-*")) and not ended.wait(0.2):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(interrupt)
        try:
            done = call("train", "reward", "--config", path)
        finally:
            ended.set()
    assert done.code == 130, done.err
    saved = sorted(tmp_path.glob("out/checkpoint-*"))
    assert saved
    assert not list((tmp_path / "out").glob("*.safetensors"))
    time.sleep(1)
    assert sorted(tmp_path.glob("out/checkpoint-*")) == saved


PLAIN = """
import peft, torch, transformers

for at, rate in enumerate((1e-3, 0.0)):
    base = transformers.AutoModelForCausalLM.from_pretrained({base!r})
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM"))
    rows = [{{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)}}] * 8
    out = {out!r} + str(at)
    args = transformers.TrainingArguments(out, max_steps=2, use_cpu=True, learning_rate=rate, save_strategy="no")
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    print("saved")
"""


def test_guard_around_a_script(tmp_path: Path, call: Caller) -> None:
    """A script that trains two models, the second with a learning rate of 0."""
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(out=str(tmp_path / "out"), base=str(QWEN2)))
    done = call("guard", "--", sys.executable, str(script))
    assert done.code == 1, done.err
    assert done.out.count("saved\n") == 1
    assert "learning-rate" not in done.out  # stdout is the script's own
    assert done.err.count("learning-rate: the learning rate is 0") == 1  # once, whoever stops
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.glob("out*/adapter_model.safetensors")] == ["adapter_model.safetensors"]


def test_guard_says_what_it_guarded(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = TrainingOutcome(status=TrainingStatus.DONE, facts={"outputs": []})
    monkeypatch.setattr(launch, "run_guarded", lambda *_, **__: (0, [ended]))
    done = call("guard", "--", "true")
    assert (done.code, done.out) == (0, "")
    assert "guarded true: no findings, no results checked" in done.err


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
