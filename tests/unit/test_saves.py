"""What a save is worth, for every state that a killed, stripped or damaged one may be in."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool.core.report.findings import RunCheckpoint
from lora_tool.verification.validating import Criteria, judge_save
from lora_tool.workflows.inventory import inventory
from lora_tool.workflows.prune import PruneOptions, Why, choose, prune
from tests.mutations import FIXTURES

Injury = Callable[[Path], object]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three saves; the last is what the tests injure."""
    for step in (2, 4, 6):
        folder = shutil.copytree(FIXTURES / "reward-run" / "checkpoint-4", tmp_path / f"checkpoint-{step}")
        state = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": step, "max_steps": 6}))
        weights = load_file(folder / WEIGHTS)
        save_file({name: tensor * step for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    return tmp_path


def gone(*names: str) -> Injury:
    def injure(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return injure


def cut(name: str) -> Injury:
    def injure(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return injure


def emptied(name: str) -> Injury:
    return lambda folder: (folder / name).write_bytes(b"")


def killed_after(*kept: str) -> Injury:
    """What is left where the process dies after it has written `kept`."""

    def injure(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink()

    return injure


def not_a_number(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file({name: tensor * torch.nan for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def points_nowhere(folder: Path) -> None:
    (folder / "latest").write_text("global_step6")


def fsdp_optimizer(injure: Injury = lambda folder: folder) -> Injury:
    """FSDP's folder of optimizer states in the place of the file."""

    def replace_file(folder: Path) -> None:
        (folder / "optimizer.pt").unlink()
        shutil.copytree(FIXTURES / "fsdp2-reward" / "pytorch_model_fsdp_0", folder / "optimizer_0")
        injure(folder / "optimizer_0")

    return replace_file


ADAPTER = ("adapter_config.json", WEIGHTS)
STATES: dict[str, tuple[Injury, str, str]] = {
    # complete, resumable, loadable, good
    "whole": (lambda folder: folder, "yes yes yes yes", ""),
    "killed before the weights": (killed_after("adapter_config.json"), "no no no no", "LT115"),
    "killed before the config": (killed_after(WEIGHTS), "no no no no", "LT214"),
    "killed after the weights": (killed_after(*ADAPTER), "no no yes no", "has no trainer_state.json"),
    "killed after the optimizer": (
        killed_after(*ADAPTER, "training_args.bin", "optimizer.pt"),
        "no no yes no",
        "has no trainer_state.json",
    ),
    "without its state": (gone("trainer_state.json"), "no no yes no", "has no trainer_state.json"),
    "state cut off": (cut("trainer_state.json"), "no no yes no", "LT113"),
    "state empty": (emptied("trainer_state.json"), "no no yes no", "LT113"),
    "weights cut off": (cut(WEIGHTS), "yes no no no", "LT101"),
    "weights NaN": (not_a_number, "yes no no no", "LT209"),
    "optimizer cut off": (cut("optimizer.pt"), "no no yes yes", "holds optimizer.pt, which is not a complete"),
    "optimizer empty": (emptied("optimizer.pt"), "no no yes yes", "holds optimizer.pt, which is not a complete"),
    "optimizer gone": (gone("optimizer.pt"), "no no yes yes", "has no optimizer state, but checkpoint-4 has"),
    "scheduler cut off": (cut("scheduler.pt"), "no no yes yes", "holds scheduler.pt, which is not a complete"),
    "scheduler gone": (gone("scheduler.pt"), "no no yes yes", "has no scheduler.pt"),
    "random states cut off": (cut("rng_state.pth"), "no no yes yes", "holds rng_state.pth, which is not a complete"),
    "random states gone": (gone("rng_state.pth"), "no no yes yes", "has no random states, but checkpoint-4 has"),
    "tag gone": (points_nowhere, "no no yes yes", "a `latest` that names global_step6, which is not there"),
    "FSDP's optimizer": (fsdp_optimizer(), "yes yes yes yes", ""),
    "FSDP's optimizer begun": (
        fsdp_optimizer(gone(".metadata")),
        "no no yes yes",
        "optimizer_0, which has no .metadata",
    ),
    "FSDP's optimizer cut off": (
        fsdp_optimizer(cut("__1_0.distcp")),
        "no no yes yes",
        "lacks __1_0.distcp, or its end",
    ),
    "FSDP's optimizer empty": (fsdp_optimizer(emptied("__0_0.distcp")), "no no yes yes", "lacks __0_0.distcp"),
    "a rank of FSDP's optimizer gone": (fsdp_optimizer(gone("__1_0.distcp")), "no no yes yes", "lacks __1_0.distcp"),
}


@pytest.mark.parametrize(("ranks", "reason"), [((0, 1), ""), ((0,), "has no rng_state_1.pth"), ((1, 2), ""), ((), "")])
def test_the_random_states_of_every_rank(ranks: tuple[int, ...], reason: str, run: Path) -> None:
    """Fewer processes have fewer of them, one process has none with a number, and a machine may have only its own."""
    for step, held in ((2, (0, 1, 2)), (4, (0, 1, 2)), (6, ranks)):
        state = run / f"checkpoint-{step}" / "rng_state.pth"
        for rank in held:
            shutil.copy(state, state.with_name(f"rng_state_{rank}.pth"))
        if held:
            state.unlink()
    assert judged(run).incomplete == (reason or None)
    if ranks == (1, 2):
        gone("rng_state_1.pth")(run / "checkpoint-4")
        assert judged(run, "checkpoint-4").incomplete == "has no rng_state_1.pth"


def rows(run: Path) -> dict[str, RunCheckpoint]:
    return {item.row.name: item.row for found in inventory(run) for item in found.checkpoints}


def judged(run: Path, name: str = "checkpoint-6") -> RunCheckpoint:
    return rows(run)[name]


def worth(row: RunCheckpoint) -> str:
    is_complete = row.incomplete is None
    return " ".join("yes" if each else "no" for each in (is_complete, row.resumable, row.loadable, row.good))


@pytest.mark.parametrize("state", STATES)
def test_what_a_save_is_worth_and_prune_keeps_what_can_be_resumed(state: str, run: Path) -> None:
    injury, expected, reason = STATES[state]
    injury(run / "checkpoint-6")
    chosen = {item.checkpoint.root.name: item for item in choose(inventory(run), keep_last=1, keep_best=0)}
    row = chosen["checkpoint-6"].checkpoint.row
    assert worth(row) == expected
    assert reason in (row.unresumable or "")
    assert chosen["checkpoint-6"].goes is (state == "weights NaN")
    assert chosen["checkpoint-2"].goes
    assert chosen["checkpoint-4"].goes is row.resumable


def test_save_only_model_is_complete_where_no_save_has_an_optimizer(run: Path) -> None:
    for folder in run.iterdir():
        gone("optimizer.pt", "scheduler.pt", "rng_state.pth")(folder)
    row = judged(run)
    assert worth(row) == "yes no yes yes"
    assert row.unresumable is not None
    assert "save_only_model" in row.unresumable
    why = [item.why for item in choose(inventory(run), keep_last=1, keep_best=1)]
    assert why == [Why.OLDER, Why.OLDER, Why.BEST]


def test_what_no_trainer_saved_does_not_lack_its_state(run: Path) -> None:
    for folder in run.iterdir():
        killed_after(*ADAPTER)(folder)
    row = judged(run)
    assert worth(row) == "yes no yes yes"
    for folder in run.iterdir():
        shutil.copy(FIXTURES / "reward-run" / "checkpoint-4" / "rng_state.pth", folder / "random_states_0.pkl")
    assert worth(judged(run)) == "yes yes yes yes"  # accelerate's own loop
    emptied("random_states_0.pkl")(run / "checkpoint-6")
    assert worth(judged(run)) == "no no yes yes"


def test_an_interrupted_save_between_others_goes(run: Path) -> None:
    killed_after(*ADAPTER)(run / "checkpoint-4")
    found = {item.checkpoint.root.name: item for item in choose(inventory(run), keep_last=1, keep_best=1)}
    assert found["checkpoint-4"].why is Why.INCOMPLETE
    assert "it has no trainer_state.json" in found["checkpoint-4"].because
    assert judged(run).rank == 1


def test_what_lost_its_optimizer_is_not_the_best_and_stays(run: Path) -> None:
    for step, loss in ((2, 0.5), (4, 0.2), (6, 0.3)):
        path = run / f"checkpoint-{step}" / "trainer_state.json"
        state = json.loads(path.read_text())
        path.write_text(json.dumps(state | {"log_history": [{"step": step, "eval_loss": loss}]}))
    gone("optimizer.pt")(run / "checkpoint-4")
    why = {item.checkpoint.root.name: item.why for item in choose(inventory(run), keep_last=1, keep_best=1)}
    assert why == {"checkpoint-2": Why.OLDER, "checkpoint-4": Why.BEST, "checkpoint-6": Why.BEST}
    assert [item.root.name for found in inventory(run) for item in found.checkpoints if item.best] == ["checkpoint-6"]


def test_a_save_in_progress_is_not_good(run: Path) -> None:
    (run / "checkpoint-6").rename(run / "tmp-checkpoint-6")
    found = rows(run)
    row = found["tmp-checkpoint-6"]
    assert (row.verdict, worth(row)) == ("incomplete", "no no yes no")
    assert found["checkpoint-4"].rank == 1


def test_a_hole_in_the_optimizer_is_seen_where_every_byte_is_read(run: Path) -> None:
    path = run / "checkpoint-6" / "optimizer.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 4 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 4)
    path.write_bytes(data)
    why = {choice.checkpoint.root.name: choice.goes for choice in prune(run, PruneOptions(), Criteria())}
    assert why == {"checkpoint-2": True, "checkpoint-4": False, "checkpoint-6": False}
    assert judge_save(run / "checkpoint-6").unresumable == "holds optimizer.pt, which is not a complete torch.save file"
    assert judge_save(run / "checkpoint-4").unresumable is None


def test_prune_reads_the_states_of_kept_saves_once(run: Path) -> None:
    read: list[int] = []

    @contextlib.contextmanager
    def watch(_: str, nbytes: int) -> Iterator[Callable[[int], None]]:
        total = [0]
        yield total.append
        read.append(sum(total))
        assert sum(total) <= nbytes

    prune(run, PruneOptions(apply=True), Criteria(), progress=watch)
    assert [path.name for path in run.iterdir()] == ["checkpoint-6"]
    assert len([nbytes for nbytes in read if nbytes]) == 1


def removed(pattern: str) -> Injury:
    def injure(folder: Path) -> None:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return injure


@pytest.mark.parametrize("meanwhile", ["cut", "rotated", "written"])
def test_prune_judges_a_run_again_that_changes_meanwhile(meanwhile: str, run: Path) -> None:
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-1")

    def change(_: Path) -> None:
        last = run / "checkpoint-6"
        if meanwhile == "cut":
            cut(WEIGHTS)(last)
        elif meanwhile == "rotated":
            shutil.rmtree(last, ignore_errors=True)
        else:
            killed_after(*ADAPTER)(shutil.copytree(last, run / "checkpoint-8", dirs_exist_ok=True))

    options = PruneOptions(keep_last=1, keep_best=0, apply=True)
    assert prune(run, replace(options, apply=False), Criteria())[2].goes
    choices = {choice.checkpoint.root.name: choice for choice in prune(run, options, Criteria(), gone=change)}
    left = {path.name for path in run.iterdir()} - {"checkpoint-8"}
    whole = {"checkpoint-6"} if meanwhile == "written" else {"checkpoint-4"}
    assert left == whole | ({"checkpoint-6"} if meanwhile == "cut" else set())
    assert {name for name, choice in choices.items() if not choice.goes} >= whole


RANKS: dict[str, tuple[Injury, str]] = {
    "a rank's optimizer": (removed("*/*rank_1*optim*"), "LT401"),
    "the weights": (removed("*/mp_rank_00_model*"), "LT401"),
    "all ranks": (removed("global_step*"), "a `latest` that names global_step2, which is not there"),
    "all ranks and the pointer": (removed("[gl]*"), "has no optimizer state, but checkpoint-2 has"),
    "the pointer": (removed("latest"), "has global_step2, but no `latest`"),
    "all ranks and the state": (removed("[!a]*"), "has no trainer_state.json"),
}


@pytest.mark.parametrize("lost", RANKS)
def test_a_run_of_rank_files_keeps_what_it_can_go_on_from(lost: str, tmp_path: Path) -> None:
    for step in (2, 4):
        folder = shutil.copytree(FIXTURES / "zero" / "stage2-reward", tmp_path / f"checkpoint-{step}")
        shutil.copy(FIXTURES / "reward-run" / f"checkpoint-{step}" / "trainer_state.json", folder)
    assert [row.complete and row.resumable for row in rows(tmp_path).values()] == [True, True]
    injury, reason = RANKS[lost]
    injury(tmp_path / "checkpoint-4")
    chosen = {item.checkpoint.root.name: item for item in choose(inventory(tmp_path), keep_last=1, keep_best=0)}
    assert reason in str(chosen["checkpoint-4"].checkpoint.row.unresumable)
    assert [item.why is Why.NONE_VALID for item in chosen.values()] == [False, False]
    assert not any(item.goes for item in chosen.values())


@pytest.mark.parametrize(
    ("injury", "expected"),
    [
        (lambda folder: folder, "yes yes yes yes"),
        (gone("trainer_state.json"), "no no yes no"),
        (cut("model-00002-of-00002.safetensors"), "yes no no no"),
        (gone("model.safetensors.index.json"), "yes no no no"),
    ],
    ids=["whole", "without its state", "weights cut off", "weights gone"],
)
def test_a_save_of_a_whole_model(injury: Injury, expected: str, tmp_path: Path) -> None:
    for step in (2, 4):
        folder = shutil.copytree(FIXTURES / "causal-llama" / "base", tmp_path / f"checkpoint-{step}")
        for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt"):
            shutil.copy(FIXTURES / "reward-run" / f"checkpoint-{step}" / name, folder)
    injury(tmp_path / "checkpoint-4")
    assert worth(judged(tmp_path, "checkpoint-4")) == expected
    going = [item.checkpoint.root.name for item in choose(inventory(tmp_path), keep_last=1, keep_best=1) if item.goes]
    assert going == (["checkpoint-2"] if expected == "yes yes yes yes" else [])
