"""Runs as they are given to commands that want one adapter: adapters with names, finished weights, and what to type next."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.calling import FIXTURES, Called, Caller

WEIGHTS = "adapter_model.safetensors"
ADAPTER = ("adapter_config.json", WEIGHTS)
LOSSES = {2: 0.5, 4: 0.3, 6: 0.9}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three saves, the second of which is the best, and the base beside it."""
    shutil.copytree(FIXTURES / "reward-qwen2" / "base", tmp_path / "base")
    log = [{"step": step, "eval_loss": loss} for step, loss in LOSSES.items()]
    for at, step in enumerate(LOSSES, 1):
        save = shutil.copytree(FIXTURES / "reward-run" / "checkpoint-4", tmp_path / "run" / f"checkpoint-{step}")
        state = json.loads((save / "trainer_state.json").read_text()) | {"global_step": step, "max_steps": 6}
        (save / "trainer_state.json").write_text(json.dumps(state | {"log_history": log[:at], "best_metric": None}))
        config = json.loads((save / "adapter_config.json").read_text())
        (save / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../../base"}))
        weights = load_file(save / WEIGHTS)
        save_file({name: tensor * step for name, tensor in weights.items()}, save / WEIGHTS, {"format": "pt"})
    return tmp_path / "run"


@pytest.fixture
def named(run: Path) -> Path:
    """The same run with a policy, and a reference that no step changed, and no adapter called `default`."""
    for save in run.iterdir():
        (save / "policy").mkdir()
        for name in ADAPTER:
            (save / name).rename(save / "policy" / name)
        config = (save / "policy" / "adapter_config.json").read_text().replace("../../base", "../../../base")
        (save / "policy" / "adapter_config.json").write_text(config)
    for save in run.iterdir():
        shutil.copytree(run / "checkpoint-2" / "policy", save / "reference")
    return run


def typed(done: Called) -> list[str]:
    """Return the words after `lora-tool` of the command that the hint ends with."""
    return shlex.split(done.err.strip().rpartition("lora-tool ")[2])


def test_adapters_with_names_are_parts_of_their_save(call: Caller, named: Path) -> None:
    (run,) = call("ls", named, "--json").json["runs"]
    rows = [(Path(row["root"]).name, row["adapters"], row["row"]["errors"], row["best"]) for row in run["checkpoints"]]
    adapters = ["policy", "reference (frozen)"]
    assert rows == [(f"checkpoint-{step}", adapters, 0, step == 4) for step in LOSSES]
    pruned = call("prune", named, "--json").json["checkpoints"]
    assert [row["goes"] for row in pruned] == [True, False, False]
    for path in (named, named / "checkpoint-4"):
        assert call("validate", path, "--base", named.parent / "base").code == 0


def test_of_adapters_with_names_one_is_merged_by_its_name(call: Caller, named: Path, tmp_path: Path) -> None:
    policy = named / "checkpoint-4" / "policy"
    refused = call("merge", "--rm", named, "-o", tmp_path / "merged")
    assert typed(refused) == ["merge", "--rm", str(policy), "-o", str(tmp_path / "merged")]
    for command in ("merge", "ci"):
        refused = call(command, named / "checkpoint-4")
        assert refused.code == 3
        assert "holds 2 adapters: policy, reference (frozen)" in refused.out + refused.err
        assert f"lora-tool {command} {policy}" in refused.out + refused.err
    assert call("merge", policy, "-o", tmp_path / "merged", "--dry-run").code == 0
    shutil.rmtree(named / "checkpoint-4" / "reference")
    assert call("ci", named / "checkpoint-4", "-o", tmp_path / "merged", "--dry-run").code == 0


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside rank files"])
def test_a_broken_adapter_with_a_name_breaks_its_save(beside: bool, call: Caller, named: Path) -> None:
    for save in named.iterdir() if beside else ():
        shutil.copytree(FIXTURES / "zero" / "stage2-reward" / "global_step2", save / "global_step2")
        (save / "latest").write_text("global_step2")
    for name in ("policy", "reference"):
        weights = named / "checkpoint-6" / name / WEIGHTS
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-9])
        (run,) = call("ls", named, "--json").json["runs"]
        assert [row["row"]["codes"] for row in run["checkpoints"]] == [[], [], ["LT101"]]
        weights.write_bytes(whole)


def test_a_reference_is_no_adapter_of_the_run(call: Caller, run: Path, tmp_path: Path) -> None:
    reference = shutil.copytree(run / "checkpoint-2", tmp_path / "reference")
    for folder in (*run.iterdir(), run):
        (folder / "ref").mkdir()
        for name in ADAPTER:
            shutil.copy(reference / name, folder / "ref" / name)
    for name in ADAPTER:
        shutil.copy(run / "checkpoint-6" / name, run / name)
    (found, other) = call("ls", run, "--json").json["runs"]
    assert [row["kind"] for row in found["checkpoints"]] == [*["trainer checkpoint"] * 3, "adapter"]
    assert [row["kind"] for row in other["checkpoints"]] == ["frozen adapter"]


def test_the_best_checkpoint_is_named_with_the_options_that_were_typed(
    call: Caller, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = call("merge", "--rm", run, "--base", tmp_path / "base")
    assert typed(refused) == ["merge", "--rm", str(run / "checkpoint-4"), "--base", str(tmp_path / "base")]
    monkeypatch.chdir(run)
    assert typed(call("merge", "--rm")) == ["merge", "--rm", "checkpoint-4"]


def test_finished_weights_that_are_not_the_best_are_merged_with_a_note(call: Caller, run: Path, tmp_path: Path) -> None:
    for step, best in ((6, False), (4, True)):
        for name in ADAPTER:
            shutil.copy(run / f"checkpoint-{step}" / name, run / name)
        words = ("merge", "--rm", run, "--base", tmp_path / "base", "-o", tmp_path / "merged", "--dry-run")
        done = call(*words)
        assert done.code == 0
        assert ("the best checkpoint is checkpoint-4 (lowest eval_loss, 0.3)" in done.err) is not best
        if not best:
            other = ["merge", "--rm", str(run / "checkpoint-4"), "--base", str(tmp_path / "base"), "--dry-run"]
            assert typed(done) == other
