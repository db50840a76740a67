"""`lora-tool ls` and `lora-tool prune` as they are typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.calling import FIXTURES, Caller


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "reward-run", tmp_path / "run")
    return tmp_path / "run"


def test_ls_shows_step_sizes_and_verdict(call: Caller) -> None:
    done = call("ls", "fixtures/reward-run")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[:5] for line in done.out.splitlines()[1:3]] == [
        ["checkpoint-2", "trainer", "checkpoint", "2", "0.636"],
        ["checkpoint-4", "*", "trainer", "checkpoint", "4"],
    ]
    assert "2 checkpoints, 176 KiB" in done.out


def test_ls_as_json(call: Caller) -> None:
    (run,) = call("ls", "fixtures/reward-run", "--json").json["runs"]
    assert [(item["row"]["step"], item["best"]) for item in run["checkpoints"]] == [(2, False), (4, True)]
    assert set(run["checkpoints"][0]["sizes"]) == {"weights", "optimizer", "rng", "other"}


def test_prune_touches_nothing_without_apply(call: Caller, run: Path) -> None:
    before = sorted(run.rglob("*"))
    done = call("prune", run)
    assert done.code == 0
    assert "would remove 1 checkpoint and free 88 KiB; --apply removes them" in done.out
    assert sorted(run.rglob("*")) == before


def test_prune_applies(call: Caller, run: Path) -> None:
    done = call("prune", run, "--apply")
    assert "removed 1 checkpoint, 88 KiB" in done.out
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]
    assert "nothing to remove" in call("prune", run, "--apply").out


def test_prune_into_a_trash_folder(call: Caller, run: Path, tmp_path: Path) -> None:
    report = call("prune", run, "--apply", "--trash", tmp_path / "trash", "--json").json
    assert [row["goes"] for row in report["checkpoints"]] == [True, False]
    assert (tmp_path / "trash" / "checkpoint-2" / "adapter_model.safetensors").is_file()


def test_the_trash_keeps_runs_apart(call: Caller, run: Path, tmp_path: Path) -> None:
    root, trash = tmp_path / "all my runs", tmp_path / "all my runs" / "trash"
    for name in ("one", "two ü"):
        shutil.copytree(run, root / name)
    done = call("prune", root, "--apply", "--trash", trash)
    assert done.code == 0
    assert sorted(str(path.relative_to(trash)) for path in trash.glob("*/*")) == [
        "one/checkpoint-2",
        "two ü/checkpoint-2",
    ]
    shutil.copytree(trash / "one" / "checkpoint-2", root / "one" / "checkpoint-2")
    shutil.copytree(run / "checkpoint-2", root / "two ü" / "checkpoint-1")
    done = call("prune", root, "--apply", "--trash", trash)
    assert done.code == 6  # one of them has its place taken: none is touched
    assert (root / "two ü" / "checkpoint-1").is_dir()


def test_usage(call: Caller, run: Path) -> None:
    assert call("prune", run, "--trash", run).code == 2
    assert call("ls", run / "missing").code == 3


def test_an_empty_folder_is_no_error(call: Caller, tmp_path: Path) -> None:
    done = call("ls", tmp_path)
    assert done.code == 0
    assert done.out.startswith("no checkpoints under")


@pytest.mark.parametrize("configured", ["", 'ignore = ["LT209"]\n', 'select = ["LT1"]\n'])
def test_every_command_names_the_same_best_checkpoint_and_verdicts(
    call: Caller, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str
) -> None:
    last = run / "checkpoint-4"  # the latest, with weights that are NaN
    stored = load_file(last / "adapter_model.safetensors")
    name = next(name for name in stored if "lora_B" in name)
    save_file(stored | {name: torch.full_like(stored[name], torch.nan)}, last / "adapter_model.safetensors")
    (tmp_path / "lora-tool.toml").write_text(configured)
    monkeypatch.chdir(tmp_path)
    (judged,) = call("validate", run, "--json").json["runs"]
    (listed,) = call("ls", run, "--json").json["runs"]
    pruned = call("prune", run, "--json").json["checkpoints"]
    taken = call("ci", run, "-o", tmp_path / "out", "--rm", "--json").json
    best = "checkpoint-4" if configured else "checkpoint-2"
    assert Path(judged["best"]).name == best
    assert [Path(row["root"]).name for row in listed["checkpoints"] if row["best"]] == [best]
    assert f"taking {best}" in taken["stages"][0]["summary"]
    assert [row["codes"] for row in judged["checkpoints"]] == [row["row"]["codes"] for row in listed["checkpoints"]]
    assert [row["verdict"] for row in judged["checkpoints"]] == [row["verdict"] for row in pruned]
    assert [Path(row["path"]).name for row in pruned if row["goes"]] == (
        ["checkpoint-2"] if configured else ["checkpoint-4"]
    )


@pytest.fixture
def iterations(tmp_path: Path) -> Path:
    """A run of Megatron with three iterations."""
    root = tmp_path / "megatron"
    for name in ("iter_0000007", "iter_0000009", "iter_0000010"):
        shutil.copytree(FIXTURES / "megatron-lora" / "iter_0000007", root / name)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def test_prune_keeps_what_it_does_not_read(call: Caller, iterations: Path) -> None:
    (iterations / "iter_0000007" / "run_config.yaml").unlink()
    why = {Path(row["path"]).name: row["why"] for row in call("prune", iterations, "--json").json["checkpoints"]}
    assert (
        why["iter_0000007"] == "lora-tool does not read its layout or method, so prune cannot tell whether it is broken"
    )
