"""The whole of it, as it is typed: TRL's options, workers by `accelerate launch`, and what is run after."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from lora_tool.checkpoint import open_checkpoint
from tests.cli.calling import Caller
from tests.hub.conftest import environment
from tests.hub.server import Hub
from tests.train.running import COMMON, QWEN2, pairs, texts, write_rows

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    """The command line in this process, which has TRL, beside what its workers print."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Caller(capfd)


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
    path.write_text(yaml.safe_dump(table))
    return path


def lora_tool(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, "-m", "lora_tool", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=500,
    )


def test_train_then_validate_then_merge_then_push_then_resume(
    tmp_path: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = {"output": str(tmp_path / "merged"), "overwrite": True}
    after = {"validate": True, "merge": merge, "push": {"repo": "me/reward", "private": True}}
    path = config(tmp_path, save_strategy="steps", save_steps=2, lora_tool={"after": after})
    with Hub() as hub, monkeypatch.context() as online:
        for name, value in environment(hub, tmp_path, HF_HUB_OFFLINE="0").items():
            online.setenv(name, value)
        done = call("train", "reward", "--config", path)
    assert done.code == 0, done.err
    pushed = hub.repos["me/reward"]
    assert pushed.private
    assert pushed.history == ["Upload reward model with lora-tool", "initial commit"]
    files = pushed.files("main")
    for name in (path.name for path in (tmp_path / "merged").glob("*.safetensors")):
        assert files[name] == (tmp_path / "merged" / name).read_bytes()
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert "set lora_task_type: SEQ_CLS" in done.err
    assert "trained reward: 4 steps" in done.out
    assert "parameters moved by" in done.out
    assert "with its head score (1 label)" in done.out
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert merged["architectures"] == ["Qwen2ForSequenceClassification"]
    out = tmp_path / "out"
    trained = load_file(out / "adapter_model.safetensors")
    report = json.loads((out / "train_report.json").read_text())
    assert (report["status"], report["findings"], report["facts"]["steps"]) == ("done", [], 4)
    for text in (
        out / "README.md",
        out / "train_report.json",
        out / "checkpoint-4" / "README.md",
        out / "lora_tool_train.json",
    ):
        assert str(tmp_path) not in text.read_text(), text
        assert str(QWEN2) not in text.read_text(), text

    broken = out / "checkpoint-4" / "optimizer.pt"
    broken.write_bytes(broken.read_bytes()[:100])
    lines = yaml.safe_load(path.read_text())
    del lines["lora_tool"]
    path.write_text(yaml.safe_dump(lines))
    again = call("train", "reward", "--config", path, "--resume", "auto", "--json")
    assert again.code == 0, again.err
    assert f"resuming from {out / 'checkpoint-2'}" in again.err
    assert [item["code"] for item in again.json["findings"]] == ["unusable-checkpoint"]
    resumed = load_file(out / "adapter_model.safetensors")
    assert trained.keys() == resumed.keys()
    # the same data in the same order from step 2: going on is as not having stopped
    for name, tensor in trained.items():
        assert tensor.allclose(resumed[name], atol=1e-6), name
    assert (out / "superseded" / "adapter_model.safetensors").is_file()


def test_a_refusal_starts_no_worker_and_names_the_line(tmp_path: Path, call: Caller) -> None:
    done = call("train", "reward", "--config", config(tmp_path), "--lora_task_type", "CAUSAL_LM")
    assert done.code == 1
    assert "error: task-type:" in done.err
    assert "hint: lora_task_type: SEQ_CLS" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_a_typo_is_a_usage_error(tmp_path: Path, call: Caller) -> None:
    done = call("train", "reward", "--config", config(tmp_path), "--lora_rr", "8")
    assert done.code == 2
    assert "unknown option `lora_rr`" in done.err
    assert "did you mean `lora_r`?" in done.err


def test_static_dry_run_prints_a_file_for_trl(tmp_path: Path, call: Caller) -> None:
    done = call(
        "train", "sft", "--config", config(tmp_path, num_processes=2), "--dry-run", "static", "--max_steps", "7"
    )
    assert done.code == 0
    command, _, text = done.out.partition("\n")
    assert command.endswith("--cpu --num_processes 2 -m lora_tool.train.worker")
    assert yaml.safe_load(text)["max_steps"] == 7
    assert yaml.safe_load(text)["logging_nan_inf_filter"] is False
    assert not (tmp_path / "out").exists()


def test_without_the_extra_there_is_one_message(tmp_path: Path, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_tool.train.config.PACKAGES", ("torch", "a_package_that_is_not_there"))
    done = call("train", "reward", "--config", config(tmp_path))
    assert done.code == 3
    error, hint = done.err.splitlines()
    assert error == "error: a_package_that_is_not_there is not installed"
    assert "[train]'" in hint


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_nothing_to_resume_is_said(tmp_path: Path, call: Caller, resume: str) -> None:
    done = call(
        *("train", "reward", "--config", config(tmp_path), "--dry-run", "static"),
        *(("--resume", "auto") if resume == "auto" else ("--resume_from_checkpoint", "true")),
    )
    assert done.code == 0
    assert "starting at step 0" in done.err


def test_a_named_checkpoint_must_be_whole(tmp_path: Path, call: Caller) -> None:
    done = call("train", "reward", "--config", config(tmp_path), "--resume", str(tmp_path / "none"))
    assert done.code == 3
    assert "cannot be resumed from" in done.err


def test_an_error_of_trls_is_one_line_and_a_file(tmp_path: Path, call: Caller) -> None:
    done = call("train", "sft", "--config", config(tmp_path, dataset_name=str(tmp_path / "nowhere")))
    assert done.code == 3
    assert "Traceback" not in done.err
    (error,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert "nowhere" in error


def test_ctrl_c_ends_every_process_and_leaves_nothing_finished(tmp_path: Path) -> None:
    path = config(tmp_path, max_steps=100_000, logging_steps=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_tool", "train", "reward", "--config", str(path)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    limit = time.monotonic() + 600
    while not metrics.exists() and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.2)
    assert metrics.exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert not list((tmp_path / "out").glob("*.safetensors"))
    size = metrics.stat().st_size
    time.sleep(1)
    assert metrics.stat().st_size == size


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
    assert "FutureWarning" not in done.stderr  # what transformers tells TRL and PEFT
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() is (code == 0)


def test_a_guarded_launcher_does_not_list_what_nobody_gave() -> None:
    says = "import accelerate.commands.launch as it; it.logger.warning('The following values were not passed'); "
    done = lora_tool("guard", "--", sys.executable, "-c", says + "it.logger.warning('something else')")
    assert "something else" in done.stderr
    assert "values were not passed" not in done.stderr


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


def test_an_adapter_without_values_is_put_together_where_that_was_asked_for(tmp_path: Path) -> None:
    from lora_tool.cli.training import _rescued
    from lora_tool.report import Severity
    from lora_tool.train.config import AfterSettings, RunConfig
    from lora_tool.train.job import TrainingOutcome, TrainingStatus
    from lora_tool.train.methods import METHODS
    from lora_tool.validation.validating import validate

    out = tmp_path / "out"
    shutil.copytree(REPOSITORY / "fixtures" / "zero" / "stage3-saved", out / "checkpoint-2")
    shutil.copytree(QWEN2, tmp_path / "base")
    empty = validate(open_checkpoint(out / "checkpoint-2")).at_least(Severity.ERROR)
    outcome = TrainingOutcome(status=TrainingStatus.BAD_RESULT, findings=empty, facts={"output": str(out / "rejected")})
    for wanted in (False, True):
        after = AfterSettings(consolidate=wanted)
        run = RunConfig(
            method=METHODS["reward"], options={"output_dir": str(out)}, given=frozenset({"output_dir"}), after=after
        )
        seen = _rescued(run, outcome)
        assert seen.status is (TrainingStatus.DONE if wanted else TrainingStatus.BAD_RESULT)
    assert seen.facts["output"] == str(out / "consolidated")
    assert not validate(
        open_checkpoint(out / "consolidated"), base=tmp_path / "base", task="reward", deep=True
    ).findings


@pytest.mark.parametrize(("launch", "rank"), [({}, 0), ({"machine_rank": 1}, 1), ({"accelerate_config": "zero3"}, 0)])
def test_after_runs_on_the_first_machine_only(tmp_path: Path, launch: dict[str, Any], rank: int) -> None:
    from lora_tool.cli.after_training import after_command
    from lora_tool.train.config import read_run_config
    from lora_tool.train.methods import METHODS

    path = config(tmp_path, lora_tool={"after": {"validate": True}}, **launch)
    run = read_run_config(METHODS["sft"], path, ())
    assert run.machine_rank == rank
    assert after_command(run, tmp_path) == ([] if rank else ["validate", str(tmp_path)])


def test_an_adapter_as_base_is_refused(tmp_path: Path, call: Caller) -> None:
    adapter = QWEN2.parent / "adapter"
    done = call("train", "reward", "--config", config(tmp_path), "--model_name_or_path", adapter)
    assert done.code == 1
    assert "error: adapter-as-base:" in done.err
    assert f"hint: lora-tool merge {adapter} -o MERGED, then model_name_or_path: MERGED" in done.err


def test_lora_options_without_lora_are_told(tmp_path: Path, call: Caller) -> None:
    path = config(tmp_path)
    lines = yaml.safe_load(path.read_text())
    del lines["use_peft"]
    path.write_text(yaml.safe_dump(lines))
    done = call("train", "sft", "--config", path, "--dry-run", "static")
    assert done.code == 0
    assert "warning: peft-off:" in done.err
    assert "peft-off" not in call("train", "sft", "--config", path, "--use_peft=false", "--dry-run", "static").err


@pytest.mark.parametrize(
    ("after", "typed"),
    [
        (
            {
                "validate": True,
                "merge": {"dtype": "bfloat16", "overwrite": True},
                "push": {"repo": "me/x", "private": False},
            },
            "ci out -o out-merged --rm --dtype=bfloat16 --overwrite --push=me/x --public",
        ),
        ({"merge": {"output": "m", "overwrite": False}}, "ci out -o m --rm"),
        ({"push": {"repo": "me/x", "private": True}}, "push out me/x --private"),
        ({"validate": True}, "validate out --rm"),
        ({}, ""),
    ],
)
def test_what_after_runs_is_one_command_that_one_would_type(tmp_path: Path, after: dict[str, Any], typed: str) -> None:
    from lora_tool.cli.after_training import after_command
    from lora_tool.train.config import read_run_config
    from lora_tool.train.methods import METHODS

    run = read_run_config(METHODS["reward"], config(tmp_path, lora_tool={"after": after}), ())
    assert shlex.join(after_command(run, Path("out"))) == typed


def test_secrets_are_not_shown(tmp_path: Path, call: Caller) -> None:
    done = call("train", "sft", "--config", config(tmp_path, hub_token="hf_abc"), "--dry-run", "static")
    assert "hf_abc" not in done.out + done.err
