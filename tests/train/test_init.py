"""`lora-tool init`: what it prints trains as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lora_tool.train.checks import require_inputs, static_findings, with_settings
from lora_tool.train.config import read_run_config, trl_arguments
from lora_tool.train.first_run import first_run
from lora_tool.train.methods import METHODS
from lora_tool.validation.validating import validate
from tests.cli.calling import Caller
from tests.train.running import QWEN2, pairs, write_rows


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Caller:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return Caller(capfd)


def test_a_reward_model_is_trained_from_it(tmp_path: Path, call: Caller) -> None:
    made = call("init", "reward", "--cpu", "-o", "run.yaml")
    assert (made.code, made.out.splitlines()[0]) == (0, "wrote run.yaml")
    assert (tmp_path / "run.yaml").read_text(encoding="utf-8") == call("init", "reward", "--cpu").out
    again = call("init", "sft", "-o", "run.yaml")
    assert (again.code, again.err.splitlines()[0]) == (6, "error: run.yaml exists")
    mine = ("--model_name_or_path", QWEN2, "--dataset_name", write_rows(tmp_path / "data", pairs()))
    done = call("train", "reward", "--config", "run.yaml", *mine, "--max_steps", "3", "--save_steps", "2")
    assert done.code == 0, done.err
    assert "trained reward: 3 steps" in done.out
    assert "no findings" in done.out
    assert not validate(tmp_path / "reward-adapter", base=QWEN2, task="reward", deep=True).findings


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_it(name: str, cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    method = METHODS[name]
    path = tmp_path / "run.yaml"
    path.write_text(first_run(method, cpu=cpu), encoding="utf-8")
    run, settings = with_settings(read_run_config(method, path, ()))
    require_inputs(run)
    assert not static_findings(run)
    assert not settings.keys() - {"logging_nan_inf_filter"}
    assert run.after.validate
    # a machine without a GPU refuses bf16 before it looks at anything else
    options = run.options if cpu else {**run.options, "use_cpu": True, "bf16": False}
    trl_arguments(method, options)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_commented_out_is_right_too(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    text = first_run(method).replace("# datasets:", "datasets:").replace("# reward_funcs:", "reward_funcs:")
    text = text.replace("# launch:", "launch:").replace("# merge:", "merge:").replace("# push:", "push:")
    table = yaml.safe_load(text)
    assert table["lora_tool"]["after"].keys() == {"validate", "merge", "push"}
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    run = read_run_config(method, tmp_path / "run.yaml", ())
    assert (run.processes, run.after.merge) == (2, {"output": f"{name}-model"})
