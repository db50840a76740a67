"""The folders that training programs leave behind are silent, too: HF Trainer, transformers, OpenRLHF, torchrun."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer, TrainingArguments

from lora_tool.core.report import Report
from tests.judging import judge, lines
from tests.mutations import FIXTURES
from tests.oracle.tiny import tiny_model

QV = ["q_proj", "v_proj"]


def _rows(labels: int | None = None) -> list[dict[str, object]]:
    return [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8] if labels is None else at % labels} for at in range(4)]


def _trained(where: Path, model: PreTrainedModel, config: LoraConfig, labels: int | None) -> Path:
    base = where / "base"
    model.save_pretrained(base)
    model.name_or_path = model.config._name_or_path = str(base)
    options = {"per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 1, "logging_steps": 1, "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(where / "run"), report_to=[], disable_tqdm=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(get_peft_model(model, config), arguments, train_dataset=_rows(labels))
        trainer.train()
        trainer.save_model()
        trainer.save_state()
    return where / "run"


@pytest.fixture(scope="module", params=["causal-lm", "reward", "encoder"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "causal-lm":
        config = LoraConfig(r=4, target_modules=QV, task_type="CAUSAL_LM")
        return _trained(where, tiny_model("llama", "causal-lm"), config, None)
    if request.param == "reward":
        config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
        return _trained(where, tiny_model("qwen2", "seq-cls"), config, 7)
    config = LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS", use_dora=True)
    return _trained(where, tiny_model("bert", "seq-cls"), config, 7)


def _complaints(folder: Path, base: Path) -> list[str]:
    reports: list[Report] = [judge(folder), judge(folder, base=base)]
    return [line for report in reports for line in lines(report)]


def test_a_trainer_run_and_each_of_its_checkpoints_is_silent(run: Path) -> None:
    assert (run / "checkpoint-1" / "optimizer.pt").exists()
    base = run.parent / "base"
    for folder in (run, run / "checkpoint-1", run / "checkpoint-2"):
        assert _complaints(folder, base) == []


def test_a_run_without_its_last_save_is_silent(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=lambda folder, names: names if Path(folder) == run else [])
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(run / name, tmp_path / "run" / name)
    assert _complaints(tmp_path / "run", run.parent / "base") == []


def test_a_whole_model_trained_by_the_trainer_is_silent(tmp_path: Path) -> None:
    model = tiny_model("llama", "seq-cls", num_labels=1)
    options = {"per_device_train_batch_size": 2, "max_steps": 1, "save_steps": 1, "use_cpu": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], disable_tqdm=True, **options)
    rows = [{**row, "labels": 0.5} for row in _rows()]
    Trainer(model, arguments, train_dataset=rows).train()
    assert lines(judge(tmp_path / "checkpoint-1", deep=True)) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_that_transformers_saved_is_silent(tmp_path: Path) -> None:
    model = tiny_model("llama", "causal-lm")
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    model.add_adapter(LoraConfig(r=4, target_modules=QV, init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert _complaints(tmp_path / "adapter", tmp_path / "base") == []


@pytest.mark.parametrize("name", ["stage1-reward", "stage2-tied", "stage3-full", "stage3-reward"])
def test_a_deepspeed_checkpoint_is_silent_wherever_it_lies(name: str, tmp_path: Path) -> None:
    zero = tmp_path / "zero"
    shutil.copytree(FIXTURES / "zero" / name / "global_step2", zero / "global_step2")
    (zero / "latest").write_text("global_step2")
    assert lines(judge(zero)) == []
    assert lines(judge(zero / "global_step2")) == []
    # OpenRLHF: CKPT/_actor/global_stepN, with the policy's adapter in the folder above
    openrlhf = tmp_path / "ckpt"
    shutil.copytree(zero, openrlhf / "_actor")
    assert lines(judge(openrlhf)) == []
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", openrlhf, dirs_exist_ok=True)
    assert lines(judge(openrlhf)) == []


def test_files_of_other_programs_beside_it_are_silent(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", folder)
    for name in (".gitattributes", ".DS_Store", "events.out.tfevents.1", "all_results.json", "train.log", "vocab.json"):
        (folder / name).write_text("{}")
    (folder / "runs" / "Nov21").mkdir(parents=True)
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / "wandb").mkdir()
    assert lines(judge(folder)) == []


def test_a_metric_that_was_never_finite_json_is_read(run: Path, tmp_path: Path) -> None:
    """Python writes NaN and Infinity into JSON; a best metric may be null or infinite."""
    folder = tmp_path / "checkpoint-1"
    shutil.copytree(run / "checkpoint-1", folder)
    state = json.loads((folder / "trainer_state.json").read_text())
    state["best_metric"] = float("inf")
    state["epoch"] = 0.5
    (folder / "trainer_state.json").write_text(json.dumps(state))
    assert lines(judge(folder)) == []
