"""`--resume auto` takes the last checkpoint that is whole, and names those it passes over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from lora_tool_train.results import last_valid, named
from lora_tool_train.resuming import resume_findings
from lora_tool_train.traps import TrainingFailed
from tests.cli.calling import Caller
from tests.train.running import QWEN2, Trainings, edited, pairs

pytestmark = pytest.mark.filterwarnings("default")

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


SAME: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "SEQ_CLS", "target_modules": "all-linear"}
"""What the fixture was trained with."""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "reward-run", tmp_path / "out"))


def rewritten(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return edit


def cut(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return edit


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("injury", "said"),
    [
        (rewritten(lambda old: {name: torch.empty(0) for name in old}), "LT206"),
        (rewritten(lambda old: {name: tensor * float("nan") for name, tensor in old.items()}), "LT209"),
        (rewritten(lambda old: {name: t for name, t in old.items() if "score" not in name}), "LT301"),
        (cut("adapter_model.safetensors"), "LT101"),
        (gone("adapter_model.safetensors"), "LT115"),
        (gone("trainer_state.json"), "not saved completely"),
        (cut("trainer_state.json"), "trainer_state.json"),
        (cut("optimizer.pt"), "optimizer.pt"),
        (cut("scheduler.pt"), "scheduler.pt"),
        (cut("rng_state.pth"), "rng_state.pth"),
        (gone("optimizer.pt"), "no optimizer state"),
        (gone("adapter_config.json"), "LT214"),
    ],
    ids=[
        "empty",
        "nan",
        "headless",
        "cut",
        "gone",
        "unfinished",
        "cut state",
        "cut optimizer",
        "cut scheduler",
        "cut rng",
        "no optimizer",
        "no config",
    ],
)
def test_a_broken_checkpoint_is_passed_over(output: Path, injury: Callable[[Path], None], said: str) -> None:
    assert last_valid(output).path == output / "checkpoint-4"
    injury(output / "checkpoint-4")
    choice = last_valid(output)
    assert choice.path == output / "checkpoint-2"
    (skipped,) = choice.skipped
    assert skipped.path == str(output / "checkpoint-4")
    assert said in skipped.message
    with pytest.raises(TrainingFailed, match="checkpoint-4"):
        named(output / "checkpoint-4")


def test_none_is_left(output: Path, tmp_path: Path) -> None:
    for step in (2, 4):
        gone("trainer_state.json")(output / f"checkpoint-{step}")
    choice = last_valid(output)
    assert choice.path is None
    assert len(choice.skipped) == 2
    assert last_valid(tmp_path / "nothing").path is None


def test_a_run_goes_on_as_if_it_had_not_stopped(train: Trainings) -> None:
    run: dict[str, Any] = {"model_name_or_path": str(QWEN2), "rows": pairs(), "max_steps": 4, "save_steps": 2}
    assert train("reward", **run, save_strategy="steps").status == "done"
    output = train.output
    trained = load_file(output / "adapter_model.safetensors")
    cut("optimizer.pt")(output / "checkpoint-4")
    again = train("reward", words=["--resume", "auto"], **run, save_strategy="steps", output_dir=str(output))
    assert (again.status, again.codes()) == ("done", {"unusable-checkpoint"})
    assert f"resuming from {output / 'checkpoint-2'}" in again.err
    resumed = load_file(output / "adapter_model.safetensors")
    assert trained.keys() == resumed.keys()
    for name, tensor in trained.items():
        assert tensor.allclose(resumed[name], atol=1e-6), name
    assert (output / "superseded" / "adapter_model.safetensors").is_file()
    # where nothing is left to train, transformers takes a step of nothing
    ended = train("reward", words=["--resume", "auto"], **run, save_strategy="steps", output_dir=str(output))
    assert (ended.status, ended.codes("error")) == ("done", set())


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({}, None, None),
        ({"target_modules": r".*_proj"}, None, None),
        ({"lora_alpha": 32}, "its scaling is 2, that of the run 8", "lora_alpha: 8, use_rslora: false"),
        ({"r": 8}, "its rank is 4, that of the run 8", "lora_r: 4, lora_alpha: 8"),
        (
            {"target_modules": r".*(q|k|v|o|up|gate)_proj"},
            "2 layers that it trained (down_proj) would not be",
            "lora_target_modules: [down_proj, gate_proj",
        ),
        ({"use_dora": True}, "its use_dora is False", "use_dora: false"),
        (
            {"task_type": None, "target_modules": r".*_proj"},
            "its modules_to_save is ['classifier', 'score'], that of the run []",
            "lora_modules_to_save",
        ),
    ],
)
def test_a_run_goes_on_with_the_adapter_of_its_checkpoint(
    changes: dict[str, Any], said: str | None, hint: str | None
) -> None:
    model = hf.AutoModelForSequenceClassification.from_pretrained(QWEN2, num_labels=1)
    mine = {**SAME, **changes}
    found = list(resume_findings(get_peft_model(model, LoraConfig(**mine)), FIXTURES / "reward-run" / "checkpoint-4"))
    assert [item.code for item in found] == ["resume-differs"] * bool(said)
    assert not said or (said in found[0].message and str(hint) in str(found[0].hint))


def test_stacked_experts_have_the_rank_of_their_checkpoint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.MixtralConfig(vocab_size=304, **sizes, num_key_value_heads=2, num_local_experts=4)
    lora: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}
    models = [get_peft_model(hf.MixtralForCausalLM(config), LoraConfig(r=rank, **lora)) for rank in (8, 4)]
    models[0].save_pretrained(str(tmp_path))
    assert not list(resume_findings(models[0], tmp_path))
    assert [found.hint for found in resume_findings(models[1], tmp_path)] == ["lora_r: 8, lora_alpha: 8"]


def test_a_run_goes_on_with_the_base_of_its_checkpoint(tmp_path: Path) -> None:
    for base, differs in (
        (shutil.copytree(QWEN2, tmp_path / "moved"), False),
        (edited(QWEN2, tmp_path / "other", lambda _, tensor: tensor * 2), True),
    ):
        model = hf.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        found = list(
            resume_findings(get_peft_model(model, LoraConfig(**SAME)), FIXTURES / "reward-run" / "checkpoint-4")
        )
        assert [item.code for item in found] == ["resume-differs"] * differs
        assert not differs or found[0].hint == f"model_name_or_path: {QWEN2}"


def test_nothing_to_resume_is_said(train: Trainings) -> None:
    done = train("reward", words=["--resume", "auto", "--dry-run"], model_name_or_path=str(QWEN2), rows=pairs())
    assert done.status == "checked"
    assert "found no complete checkpoint in" in done.err


def test_rank_files_are_an_optimizer(tmp_path: Path, call: Caller) -> None:
    zero = tmp_path / "out" / "checkpoint-2"
    shutil.copytree(FIXTURES / "reward-qwen2" / "base", tmp_path / "base")
    shutil.copytree(FIXTURES / "zero" / "stage3-saved", zero)
    assert call("consolidate", zero, "-o", tmp_path / "whole", "--what", "adapter").code == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "whole" / name, zero / name)
    shutil.copy(FIXTURES / "reward-run" / "checkpoint-2" / "trainer_state.json", zero)
    assert last_valid(tmp_path / "out").path == zero
    next((zero / "global_step2").glob("*rank_1*optim*")).unlink()
    choice = last_valid(tmp_path / "out")
    assert choice.path is None
    assert "LT401" in choice.skipped[0].message


@pytest.mark.parametrize("folder", ["megatron-lora", "zero/stage2-tied", "causal-llama/adapter", "reward-run"])
def test_what_no_trainer_saved_is_not_resumed_from(folder: str) -> None:
    with pytest.raises(TrainingFailed, match="has no trainer_state.json") as refused:
        named(FIXTURES / folder)
    assert "--resume auto" in str(refused.value.hint)
