"""`lora-tool guard`: the same guards inside trainings that are not ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

from lora_tool_train import guard
from lora_tool_train.job import GuardSettings, TrainingJob, TrainingStatus, read_outcomes
from lora_tool_train.live_checks import leak
from lora_tool_train.results import saved_in
from lora_tool_train.traps import TrainingStopped
from tests.train.running import FIXTURES, LLAMA, QWEN2, TINY, attached, edited, pairs, texts

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Path]:
    """Attach the guard as a guarded process has it; yields the folder that the parent reads."""
    folder = tmp_path / "job"
    folder.mkdir()
    with attached(folder, TrainingJob(guard=GuardSettings())):
        yield folder


def sft(
    tmp_path: Path,
    base: Path,
    prepare: Callable[[Any], None] = lambda _: None,
    optimizers: Any = (None, None),
    **options: Any,
) -> Any:
    """Train as a script of a user's would, and save."""
    from trl import SFTConfig, SFTTrainer

    settings = {
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-3,
    }
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    prepare(model)
    args = SFTConfig(str(tmp_path / "out"), report_to="none", disable_tqdm=True, **{**settings, **options})
    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    rows = Dataset.from_list(texts())
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, optimizers=optimizers)
    trainer.train()
    trainer.save_model()
    return trainer


def outcome_in(folder: Path) -> Any:
    guard.write_done()
    (outcome,) = read_outcomes(folder)
    return outcome


@pytest.mark.parametrize(
    ("prepare", "options", "code"),
    [
        (lambda model: model.disable_adapter_layers(), {}, "frozen-adapter"),
        (lambda model: [p.requires_grad_(not p.requires_grad) for p in model.parameters()], {}, "frozen-adapter"),
        (lambda _: None, {"learning_rate": 0.0}, "learning-rate"),
        (lambda _: None, {"optimizers": (torch.optim.SGD([torch.zeros(1)], lr=0.1), None)}, "never-moved"),
        (lambda model: model.get_base_model().lm_head.weight.data.fill_(float("nan")), {}, "nan-gradients"),
    ],
    ids=["switched off", "frozen", "rate of 0", "never moved", "nan in the base"],
)
def test_a_doomed_script_is_left_before_it_saves(
    tmp_path: Path, guarded: Path, prepare: Callable[[Any], None], options: dict[str, Any], code: str
) -> None:
    with pytest.raises(TrainingStopped, match=code):
        sft(tmp_path, LLAMA, prepare, **options)
    outcome = outcome_in(guarded)
    assert outcome.status is TrainingStatus.STOPPED
    assert code in {item.code for item in outcome.findings}
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_checkpoint_without_the_adapter_ends_the_run(
    tmp_path: Path, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = PeftModel.save_pretrained  # as PEFT 0.21 saves under FSDP1, where it takes no tensor for the adapter's
    monkeypatch.setattr(
        PeftModel, "save_pretrained", lambda self, *args, **how: save(self, *args, **{**how, "state_dict": {}})
    )
    with pytest.raises(TrainingStopped, match="not-saved.*has no LoRA tensor"):
        sft(tmp_path, QWEN2, save_strategy="steps", save_steps=1, max_steps=4)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]
    assert [found.code for found in outcome_in(guarded).findings] == ["not-saved"]


@pytest.mark.parametrize("task", [None, "SEQ_CLS"])
def test_a_head_that_would_not_be_saved_is_seen(tmp_path: Path, guarded: Path, task: str | None) -> None:
    from trl import RewardConfig, RewardTrainer

    model = hf.AutoModelForSequenceClassification.from_pretrained(QWEN2, num_labels=1, pad_token_id=0)
    args = RewardConfig(
        str(tmp_path / "out"), max_steps=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no"
    )
    trainer = RewardTrainer(
        model,
        args,
        train_dataset=Dataset.from_list(pairs()),
        processing_class=hf.AutoTokenizer.from_pretrained(QWEN2),
        peft_config=LoraConfig(task_type=task, target_modules=["q_proj"]),
    )
    if task is None:
        with pytest.raises(TrainingStopped, match="head would not be saved"):
            trainer.train()
    else:
        trainer.train()
    assert {item.code for item in outcome_in(guarded).findings} == ({"task-type"} if task is None else set())


def test_an_adapter_of_an_earlier_run_is_not_judged(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero" / "stage3-saved", tmp_path / "out")
    assert list(saved_in([tmp_path / "out"], since=4e9)) == []


def test_of_several_adapters_the_trained_ones_are_judged_and_no_other_method(tmp_path: Path) -> None:
    good = FIXTURES / "causal-llama" / "adapter"
    shutil.copytree(good, tmp_path / "second")
    edited(good, tmp_path / "default", lambda name, tensor: tensor * 0 if "lora_B" in name else tensor)
    for path in (tmp_path / "default").iterdir():  # PEFT saves the one of this name in the folder itself
        path.rename(tmp_path / path.name)
    (tmp_path / "default").rmdir()
    untold = {item.path.name: {found.code for found in item.errors} for item in saved_in([tmp_path])}
    assert untold == {tmp_path.name: {"LT208"}, "second": set()}
    (judged,) = saved_in([tmp_path], trained={"default": False, "second": True})
    assert (judged.path.name, judged.errors) == ("second", ())
    config = tmp_path / "second" / "adapter_config.json"
    config.write_text(config.read_text().replace('"LORA"', '"IA3"'))
    (other,) = saved_in([tmp_path / "second"])
    assert (other.errors, other.unchecked) == ((), "IA3")


@pytest.mark.parametrize(("config", "leaks"), [(hf.FalconConfig, True), (hf.LlamaConfig, False)])
def test_a_model_in_shards_is_judged_by_its_kind(config: Any, leaks: bool) -> None:
    model = hf.AutoModelForCausalLM.from_config(
        config(**TINY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    how = leak(model, None, packing=False, sharded=True)
    said = f"{model.config.model_type} leaked wherever it was probed (its weights are sharded here)"
    assert how == (said if leaks else None)
