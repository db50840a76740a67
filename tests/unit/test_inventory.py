"""What lies under a folder, and what pruning chooses of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lora_tool import consolidate
from lora_tool.checkpoints import RunDir, open_checkpoint, saves_in
from lora_tool.core.errors import ExecutionError, NotACheckpoint, OutputExists
from lora_tool.core.report.findings import Run
from lora_tool.execution.folder import remove
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.rules.training.saves import Judged, run_table
from lora_tool.verification.validating import validate as judge
from lora_tool.workflows import inventory as inventory_module
from lora_tool.workflows.inventory import FileRole, inventory
from lora_tool.workflows.prune import Why, choose

RUN = Path(__file__).parents[2] / "fixtures" / "reward-run"


def make_run(root: Path, losses: dict[int, float | None], *, broken: tuple[int, ...] = ()) -> Path:
    """Copy a real checkpoint for every step, with the evaluation losses of all steps up to it in its log."""
    log: list[dict[str, float]] = []
    for step, loss in losses.items():
        folder = root / f"checkpoint-{step}"
        shutil.copytree(RUN / "checkpoint-4", folder)
        state = json.loads((folder / "trainer_state.json").read_text())
        if loss is not None:
            log.append({"step": step, "eval_loss": loss})
        state |= {"global_step": step, "max_steps": max(losses), "log_history": list(log), "best_metric": None}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        if step in broken:
            weights = folder / "adapter_model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-9])
    return root


def chosen(root: Path, *, last: int, best: int) -> dict[int, Why]:
    found = choose(inventory(root), keep_last=last, keep_best=best)
    return {int(item.checkpoint.root.name.rpartition("-")[2]): item.why for item in found}


def test_lists_each_checkpoint_once_with_its_bytes() -> None:
    (run,) = inventory(RUN)
    assert [item.row.step for item in run.checkpoints] == [2, 4]
    for item in run.checkpoints:
        assert sum(item.sizes.values()) == sum(path.stat().st_size for path in item.root.rglob("*"))
        assert item.sizes[FileRole.WEIGHTS] == (item.root / "adapter_model.safetensors").stat().st_size
        assert item.sizes[FileRole.RNG] == (item.root / "rng_state.pth").stat().st_size
        names = ("optimizer.pt", "scheduler.pt")
        assert item.sizes[FileRole.OPTIMIZER] == sum((item.root / name).stat().st_size for name in names)


def test_deepspeeds_tags_are_saves_of_a_run_but_in_a_save_of_the_trainer() -> None:
    zero = RUN.parent / "zero"
    found = {str(item.root.relative_to(zero)): item.kind for run in inventory(zero) for item in run.checkpoints}
    tags = {str(path.relative_to(zero)): "DeepSpeed checkpoint" for path in zero.glob("*/global_step*")}
    del tags["stage3-frozen-head/global_step2"]
    assert found.pop("stage3-frozen-head") == "trainer checkpoint"
    beside = {path.parent.name for path in zero.glob("*/adapter_config.json")} - {"stage3-frozen-head"}
    assert found == {**tags, **dict.fromkeys(beside, "adapter")}


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    make_run(tmp_path, {10: 0.5, 20: 0.2, 100: 0.3, 110: 0.4})
    assert chosen(tmp_path, last=1, best=1) == {10: Why.OLDER, 20: Why.BEST, 100: Why.OLDER, 110: Why.LAST}
    assert chosen(tmp_path, last=0, best=2) == {10: Why.OLDER, 20: Why.BEST, 100: Why.BEST, 110: Why.RESUMABLE}
    assert chosen(tmp_path, last=9, best=0) == dict.fromkeys((10, 20, 100, 110), Why.LAST)
    assert chosen(tmp_path, last=1, best=0) == {10: Why.OLDER, 20: Why.FIRST, 100: Why.OLDER, 110: Why.LAST}


def test_a_metric_of_which_more_is_better(tmp_path: Path) -> None:
    make_run(tmp_path, {1: 0.1, 2: 0.3, 3: 0.2})
    for folder in tmp_path.iterdir():
        state = (folder / "trainer_state.json").read_text()
        (folder / "trainer_state.json").write_text(state.replace("eval_loss", "eval_accuracy"))
    assert chosen(tmp_path, last=0, best=1) == {1: Why.OLDER, 2: Why.BEST, 3: Why.RESUMABLE}


def _adapter(save: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    save.mkdir(parents=True)
    for name in names:
        shutil.copy(RUN / "checkpoint-4" / name, save)


def _accelerate(save: Path) -> None:
    save.mkdir()
    weights = load_file(RUN / "checkpoint-4" / "adapter_model.safetensors")
    default = {
        name.replace(".weight", ".default.weight"): tensor for name, tensor in weights.items() if ".lora_" in name
    }
    save_file(default, save / "model.safetensors", {"format": "pt"})
    for name, called in {"optimizer.pt": "optimizer.bin", "rng_state.pth": "random_states_0.pkl"}.items():
        shutil.copy(RUN / "checkpoint-4" / name, save / called)


def _deepspeed(save: Path) -> None:
    shutil.copytree(RUN.parent / "zero" / "stage2-reward" / "global_step2", save / "checkpoint")
    (save / "latest").write_text("checkpoint")


SAVES: dict[str, Callable[[Path], None]] = {
    "checkpoint_{}": _accelerate,
    "checkpoint_{}/": _adapter,
    "step_{}": _adapter,
    "epoch-{}": _adapter,
    "iter{}": _adapter,
    "epoch_0_step_{}": lambda save: _adapter(save / "model"),
    "epoch0epochstep{0}globalstep{0}": _adapter,
    "global_step{}_hf": _adapter,
    "epoch=1-step={}.ckpt": _deepspeed,
    "epoch={}-val_loss=0.32-v1.ckpt": _deepspeed,
}


@pytest.mark.parametrize("called", SAVES)
def test_a_run_is_known_whatever_its_program_calls_its_saves(called: str, tmp_path: Path) -> None:
    for step in (2, 9, 10):
        SAVES[called](tmp_path / called.format(step))
        (tmp_path / f"images_{step}").mkdir()
    run = open_checkpoint(tmp_path)
    names = tuple(called.strip("/").format(step) for step in (2, 9, 10))
    assert (type(run), saves_in(run.folder)) == (RunDir, names)
    (table,) = judge(run).runs
    assert [row.step for row in table.checkpoints] == [2, 9, 10]
    assert (table.best, {row.verdict for row in table.checkpoints}) == (str(tmp_path / names[2]), {"good"})
    goes = {item.checkpoint.root.name: item.goes for item in choose(inventory(tmp_path), keep_last=1, keep_best=1)}
    assert goes == dict(zip(names, (True, True, False), strict=True))


def test_folders_called_like_saves_without_weights_are_none(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "sample.png").touch()
    (tmp_path / "step_2").symlink_to(tmp_path)
    assert list(inventory(tmp_path)) == []


def test_saves_with_other_names_are_no_later_ones(tmp_path: Path) -> None:
    for name in ("epoch_0", "epoch_1", "step_500", "step_1000"):
        _adapter(tmp_path / name)
    goes = {item.checkpoint.root.name: item.goes for item in choose(inventory(tmp_path), keep_last=1, keep_best=1)}
    assert goes == {"epoch_0": True, "epoch_1": False, "step_500": True, "step_1000": False}


def test_saves_of_two_models_are_complete_and_warned_of(tmp_path: Path) -> None:
    for step in (1, 2):
        _accelerate(tmp_path / f"checkpoint_{step}")
        shutil.copy(
            tmp_path / f"checkpoint_{step}" / "model.safetensors",
            tmp_path / f"checkpoint_{step}" / "model_1.safetensors",
        )
    (found,) = inventory(tmp_path)
    assert [(item.row.verdict, item.row.codes, item.row.complete) for item in found.checkpoints] == 2 * [
        ("warned", ("LT114",), True)
    ]
    with pytest.raises(NotACheckpoint, match="holds the states of 2 models: model, model_1"):
        consolidate(tmp_path / "checkpoint_2", out=tmp_path / "out")


def test_a_save_of_accelerate_that_is_cut_off_is_incomplete(tmp_path: Path) -> None:
    for step in (1, 2):
        _accelerate(tmp_path / f"checkpoint_{step}")
    (tmp_path / "checkpoint_2" / "random_states_0.pkl").unlink()
    (found,) = inventory(tmp_path)
    assert [item.row.incomplete for item in found.checkpoints] == [None, "has no random states, but checkpoint_1 has"]
    goes = [(item.goes, item.why) for item in choose([found], keep_last=1, keep_best=1)]
    assert goes == [(False, Why.BEST), (False, Why.NEWER)]


def test_broken_ones_go_unless_they_are_the_newest(tmp_path: Path) -> None:
    make_run(tmp_path, dict.fromkeys((1, 2, 3, 4)), broken=(1, 4))
    assert chosen(tmp_path, last=1, best=0) == {1: Why.INVALID, 2: Why.OLDER, 3: Why.LAST, 4: Why.NEWER}


def test_an_adapter_of_another_method_is_not_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path, dict.fromkeys((2, 4, 6)))
    config = run / "checkpoint-2" / "adapter_config.json"
    config.write_text(config.read_text().replace('"LORA"', '"LOHA"'))
    (found,) = inventory(run)
    assert [item.row.verdict for item in found.checkpoints] == ["not judged", "good", "good"]
    assert chosen(run, last=1, best=0)[2] is Why.REFUSED


@pytest.mark.parametrize(("last", "best"), [(0, 0), (0, 1), (1, 0)])
def test_the_only_complete_one_never_goes(tmp_path: Path, last: int, best: int) -> None:
    make_run(tmp_path, dict.fromkeys((1, 2, 3)), broken=(1, 3))
    why = {(0, 0): Why.FIRST, (0, 1): Why.BEST, (1, 0): Why.LAST}
    assert chosen(tmp_path, last=last, best=best)[2] is why[last, best]


def test_where_nothing_is_valid_nothing_goes(tmp_path: Path) -> None:
    make_run(tmp_path, dict.fromkeys((1, 2)), broken=(1, 2))
    assert set(chosen(tmp_path, last=1, best=1).values()) == {Why.NONE_VALID}


def test_each_run_keeps_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "one", dict.fromkeys((1, 2)))
    make_run(tmp_path / "two", dict.fromkeys((1, 2)))
    going = [item.checkpoint.root for item in choose(inventory(tmp_path), keep_last=1, keep_best=0) if item.goes]
    assert going == [tmp_path / "one" / "checkpoint-1", tmp_path / "two" / "checkpoint-1"]


def test_finished_weights_and_models_are_not_for_pruning(tmp_path: Path) -> None:
    make_run(tmp_path, dict.fromkeys((1, 2)))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(RUN / "checkpoint-4" / name, tmp_path / name)
    assert set(chosen(tmp_path, last=1, best=0)) == {1, 2}


def test_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no such folder"):
        list(inventory(tmp_path / "missing"))
    assert list(inventory(tmp_path)) == []


def test_removing_and_moving(tmp_path: Path) -> None:
    make_run(tmp_path, dict.fromkeys((1, 2, 3)))
    remove(tmp_path / "checkpoint-1")
    remove(tmp_path / "checkpoint-2", trash=tmp_path / "trash" / "deep")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "trash"]
    assert (tmp_path / "trash" / "deep" / "checkpoint-2" / "adapter_config.json").is_file()
    make_run(tmp_path, {2: None})
    with pytest.raises(OutputExists, match="checkpoint-2"):
        remove(tmp_path / "checkpoint-2", trash=tmp_path / "trash" / "deep")
    with pytest.raises(ExecutionError, match="cannot be removed"):
        remove(tmp_path / "checkpoint-7")


def test_a_metric_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    make_run(tmp_path, {1: float("nan"), 2: 0.3, 3: 0.5, 4: float("nan")})
    assert chosen(tmp_path, last=0, best=1) == {1: Why.OLDER, 2: Why.BEST, 3: Why.OLDER, 4: Why.RESUMABLE}


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", dict.fromkeys((1, 2, 3, 4)))
    (run / "best").symlink_to("checkpoint-2")
    other = make_run(tmp_path / "other", {9: None})
    (other / "checkpoint-1").symlink_to(run / "checkpoint-3")
    found = {
        item.checkpoint.root.relative_to(tmp_path): item.why
        for item in choose(inventory(tmp_path), keep_last=1, keep_best=0)
    }
    assert {str(path): why for path, why in found.items()} == {
        "run/checkpoint-1": Why.OLDER,
        "run/checkpoint-2": Why.POINTED_AT,
        "run/checkpoint-3": Why.POINTED_AT,
        "run/checkpoint-4": Why.LAST,
        "other/checkpoint-1": Why.LINK,
        "other/checkpoint-9": Why.LAST,
    }


def test_a_link_is_no_valid_checkpoint_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path / "elsewhere", {5: None})
    run = make_run(tmp_path / "run", {1: None})
    (run / "checkpoint-5").symlink_to(tmp_path / "elsewhere" / "checkpoint-5")
    assert chosen(run, last=1, best=0) == {1: Why.LAST, 5: Why.LINK}


def test_what_a_killed_removal_left_is_cleaned_up(tmp_path: Path) -> None:
    make_run(tmp_path, dict.fromkeys((1, 2)))
    (tmp_path / "checkpoint-1").rename(tmp_path / ".checkpoint-1.77.lora-tool-removed")
    remove(tmp_path / "checkpoint-2")
    assert list(tmp_path.iterdir()) == []


def test_of_many_checkpoints_one_keeps_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # by name the furthest comes neither first nor last
    make_run(tmp_path, {10: 0.5, 20: 0.2, 30: 0.3, 40: 0.4})
    for old, new in ((30, 31), (40, 30), (31, 40)):
        (tmp_path / f"checkpoint-{old}").rename(tmp_path / f"checkpoint-{new}")
    kept: list[list[int]] = []

    def watched(root: Path, judged: Sequence[Judged], *, log: TrainerState) -> Run:
        kept.append([len(log.log), *(len(item.state.log) if item.state else 0 for item in judged)])
        return run_table(root, judged, log=log)

    monkeypatch.setattr(inventory_module, "run_table", watched)
    (run,) = inventory(tmp_path)
    assert kept == [[4, 1, 1, 1, 1]]
    assert [item.row.metric for item in run.checkpoints] == [0.5, 0.2, 0.4, 0.3]
    assert [item.best for item in run.checkpoints] == [False, True, False, False]
