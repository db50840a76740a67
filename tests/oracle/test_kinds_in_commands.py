"""Every kind of checkpoint in every command that looks at checkpoints: called by its name, with the documented exit code.

One process, as a shell would start it, says what `validate`, `inspect`, `ls`, `prune` and `ci` make of each kind. None of
them may import torch.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lora_tool.checkpoints import ShardedKind, kinds
from lora_tool.checkpoints.deepspeed import ZERO
from lora_tool.checkpoints.fsdp import DCP
from lora_tool.verification.validating import judge_save
from lora_tool_train.results import named
from lora_tool_train.traps import TrainingFailed
from tests.cli.calling import Caller
from tests.hostile.folders import FIXTURES, environment

COMMANDS = """
import contextlib, io, json, sys
from lora_tool.cli.main import main
done = []
for arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as stopped:
            code = stopped.code
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps([done, "torch" in sys.modules]))
"""
TRAINER_STATE = FIXTURES / "reward-run" / "checkpoint-2" / "trainer_state.json"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A checkpoint of one kind: `root` is what is given to a command, `save` one save of a run, called as it is there."""

    root: Path
    save: Path
    base: Path
    names: tuple[str, str] = ("checkpoint-1", "checkpoint-2")
    """What two saves of one run are called."""
    options: tuple[str, ...] = ()
    """What `ci` has to be told: alpha where no file of the run says it."""


def adapter(_: Path, __: Path) -> Sample:
    pair = FIXTURES / "causal-llama"
    return Sample(root=pair / "adapter", save=pair / "adapter", base=pair / "base")


def base_model(_: Path, __: Path) -> Sample:
    folder = FIXTURES / "causal-llama" / "base"
    return Sample(root=folder, save=folder, base=folder)


def run_folder(_: Path, __: Path) -> Sample:
    run = FIXTURES / "reward-run"
    return Sample(root=run, save=run / "checkpoint-4", base=FIXTURES / "reward-qwen2" / "base")


def deepspeed(_: Path, out: Path) -> Sample:
    """Without the adapter that the HF Trainer puts beside."""
    root = Path(shutil.copytree(FIXTURES / "zero" / "stage3-reward", out / "zero"))
    (root / "adapter_model.safetensors").unlink()
    config = (root / "adapter_config.json").rename(out / "adapter_config.json")
    return Sample(
        root=root,
        save=root / "global_step2",
        base=FIXTURES / "reward-qwen2" / "base",
        names=("global_step1", "global_step2"),
        options=("--adapter-config", str(config)),
    )


def megatron(_: Path, out: Path) -> Sample:
    torch.manual_seed(3)
    config = LlamaConfig(**json.loads((FIXTURES / "megatron-swift" / "base" / "config.json").read_text()))
    LlamaForCausalLM(config).save_pretrained(out / "base")
    root = FIXTURES / "megatron-lora"
    return Sample(root=root, save=root / "iter_0000007", base=out / "base", names=("iter_0000001", "iter_0000002"))


def adapter_set(_: Path, out: Path) -> Sample:
    """Of one adapter, which is not called `default`."""
    root = out / "checkpoint-1"
    shutil.copytree(FIXTURES / "causal-llama" / "adapter", root / "policy")
    shutil.copy(TRAINER_STATE, root)
    return Sample(root=root, save=root, base=FIXTURES / "causal-llama" / "base")


def state_file(trainers: Path, out: Path) -> Sample:
    root = out / "state"
    root.mkdir()
    torch.save({"model": load_file(trainers / "truth-fp32.safetensors")}, root / "state.pt")
    return Sample(root=root, save=root, base=trainers / "base", options=("--lora-alpha", "5"))


def saved(name: str, *inside: str, names: tuple[str, str] = Sample.names, alpha: bool = True) -> Maker:
    """Return the maker of a sample that `trainer_saves` made, whose saves are the folder `inside` of it."""

    def make(trainers: Path, _: Path) -> Sample:
        root = trainers / name
        options = ("--lora-alpha", "5") if alpha else ()
        return Sample(root=root, save=root.joinpath(*inside), base=trainers / "base", names=names, options=options)

    return make


Maker = Callable[[Path, Path], Sample]
MAKERS: dict[str, Maker] = {
    "adapter": adapter,
    "base model": base_model,
    "run folder": run_folder,
    "adapter set": adapter_set,
    "DeepSpeed checkpoint": deepspeed,
    "Megatron checkpoint": megatron,
    "FSDP checkpoint": saved("fsdp2-dcp-bf16", "pytorch_model_fsdp_0", names=("step-1", "step-2")),
    "FSDP checkpoint of rank files": saved("fsdp2-ranks"),
    "FSDP full state dict": saved("fsdp2-full"),
    "distributed safetensors checkpoint": saved("safetensors"),
    "verl checkpoint": saved("verl-fsdp2", "global_step_3", names=("global_step_1", "global_step_2"), alpha=False),
    "training state in one file": state_file,
}


def test_every_kind_has_a_sample() -> None:
    # only llama.cpp reads the last, which is no save of a run: tests/oracle/test_gguf.py
    assert MAKERS.keys() == {kind.name for kind in kinds()} - {"GGUF adapter"}


Answer = tuple[int, str, str]
"""A command's exit code, its output and its errors."""


@pytest.fixture(scope="module")
def samples(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    return {kind: make(trainers, tmp_path_factory.mktemp("made")) for kind, make in MAKERS.items()}


@pytest.fixture(scope="module")
def answers(samples: dict[str, Sample], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """What each command said of each kind, where all were called in one process, without torch."""
    asked: list[tuple[str | Path, ...]] = []
    for kind, sample in samples.items():
        folder = tmp_path_factory.mktemp("runs")
        for name in sample.names:
            shutil.copytree(sample.save, folder / "run" / name)
        asked += [
            ("validate", sample.root, "--base", sample.base, "--json"),
            ("inspect", sample.root),
            ("inspect", sample.root, "--json"),
            ("ls", sample.root if kind == "run folder" else folder / "run", "--json"),
            ("prune", folder / "run", "--json"),
            ("ci", sample.root, "--base", sample.base, "-o", folder / "merged", "--json", *sample.options),
        ]
    arguments = json.dumps([[str(word) for word in command] for command in asked])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, arguments], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results, has_torch = json.loads(done.stdout.splitlines()[-1])
    assert not has_torch, "torch was imported"
    each = len(asked) // len(samples)
    return {kind: results[at * each : (at + 1) * each] for at, kind in enumerate(samples)}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_command_knows_it(kind: str, samples: dict[str, Sample], answers: dict[str, list[Answer]]) -> None:
    """By its name; and of a run the older save goes, the newest stays."""
    validated, shown, inspected, listed, pruned, ci = answers[kind]
    assert not [answer for answer in answers[kind] if "Traceback" in answer[1] + answer[2]]
    assert [each[0] for each in (validated, shown, inspected, listed, pruned)] == [0] * 5, (validated, listed)
    assert kind in {subject["kind"] for subject in json.loads(validated[1])["subjects"]}
    assert kind in shown[1]
    assert json.loads(inspected[1])["kind"] == kind
    of_save = "trainer checkpoint" if kind == "run folder" else kind
    rows = [row for found in json.loads(listed[1])["runs"] for row in found["checkpoints"]]
    assert [(row["kind"], row["row"]["errors"]) for row in rows] == [(of_save, 0)] * 2
    goes = {Path(row["path"]).name: row["goes"] for row in json.loads(pruned[1])["checkpoints"]}
    assert goes == dict(zip(samples[kind].names, (True, False), strict=True))
    stages = json.loads(ci[1])["stages"]
    assert ci[0] == 0, stages
    assert stages[0]["summary"].startswith(kind)


@pytest.mark.parametrize("kind", [kind.name for kind in kinds() if isinstance(kind, ShardedKind)])
def test_it_knows_which_kinds_a_trainer_can_resume_from(kind: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    """In a trainer's own folder, that is; kinds whose weights are whole: tests/train/test_resume.py."""
    with pytest.raises(TrainingFailed, match=r"has no trainer_state\.json"):
        named(samples[kind].root)
    (found,) = (each for each in kinds() if each.name == kind)
    assert isinstance(found, ShardedKind)
    checkpoint = Path(shutil.copytree(samples[kind].root, tmp_path / "checkpoint-2"))
    shutil.copy(TRAINER_STATE, checkpoint)
    why = judge_save(checkpoint).unresumable
    if found in (ZERO, DCP) or kind == "FSDP full state dict":
        assert found.resumed_by_trainer
        assert why is None
    else:
        assert why == f"is {found.with_article}, from which transformers' Trainer cannot resume"


@pytest.fixture
def mixed(trainers: Path, tmp_path: Path) -> Path:
    """A run with DeepSpeed's tags, of which `latest` names the first, and plain distributed checkpoints."""
    run = tmp_path / "mixed"
    for step in (5, 10):
        shutil.copytree(FIXTURES / "zero" / "stage3-reward" / "global_step2", run / f"global_step{step}")
    shutil.copytree(run / "global_step10", run / "global_step10_universal")
    for step in (3, 20):
        shutil.copytree(trainers / "fsdp2-dcp-bf16" / "pytorch_model_fsdp_0", run / f"step-{step}")
    (run / "latest").write_text("global_step5")
    (run / "step-30").mkdir()  # a common name, and nothing in it
    return run


def test_the_saves_of_two_frameworks_in_one_run(mixed: Path, call: Caller) -> None:
    (run,) = call("ls", mixed, "--json").json["runs"]
    pruned = call("prune", mixed, "--apply", "--json").json
    found = [(Path(row["root"]).name, row["kind"]) for row in run["checkpoints"]]
    ours, theirs = "DeepSpeed checkpoint", "FSDP checkpoint"
    assert found == [
        ("step-3", theirs),
        ("global_step5", ours),
        ("global_step10", ours),
        ("global_step10_universal", ours),
        ("step-20", theirs),
    ]
    why: dict[str, Any] = {Path(row["path"]).name: row["why"] for row in pruned["checkpoints"]}
    assert why["global_step5"] == "the run's own pointer names it"
    assert sorted(path.name for path in mixed.iterdir()) == ["global_step5", "latest", "step-20", "step-30"]


def test_what_a_universal_pointer_names_is_kept(mixed: Path, call: Caller) -> None:
    (mixed / "latest_universal").write_text("global_step10_universal")
    call("prune", mixed, "--apply")
    kept = sorted(path.name for path in mixed.iterdir() if path.is_dir())
    assert kept == ["global_step10_universal", "global_step5", "step-20", "step-30"]


def test_a_tag_in_a_trainers_save_is_a_part_of_it(tmp_path: Path, call: Caller) -> None:
    save = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(FIXTURES / "zero" / "stage3-reward", save)
    shutil.copytree(save / "global_step2", save / "global_step1")
    for root in (tmp_path / "run", save):
        (row,) = (row for run in call("ls", root, "--json").json["runs"] for row in run["checkpoints"])
        assert Path(row["root"]) == save
        assert sum(row["sizes"].values()) == sum(path.stat().st_size for path in save.rglob("*") if path.is_file())
        assert [Path(each["path"]) for each in call("prune", root, "--json").json["checkpoints"]] == [save]


def test_the_newest_of_several_steps_is_judged(mixed: Path, tmp_path: Path, call: Caller) -> None:
    steps = tmp_path / "steps"
    for step in (100, 20):
        shutil.copytree(mixed / "step-3", steps / f"step-{step}")
    (steps / "step-100" / "__1_0.distcp").unlink()
    found = {finding["code"]: finding for finding in call("validate", steps, "--json").json["findings"]}
    assert found["LT401"]["path"].startswith(str(steps / "step-100"))
    assert found["LT409"]["message"] == "the folder has several steps: step-20, step-100"
    consolidated = call("consolidate", steps, "-o", tmp_path / "out", "--lora-alpha", "5")
    assert (consolidated.code, "choose: --tag FOLDER" in consolidated.err) == (3, True)
