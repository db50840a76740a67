"""Trap 1: a reward model with LoRA. The wrong task type loses the head; float16 overflows and shows loss 0.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import PeftModel
from safetensors.torch import load_file

from lora_tool.checkpoints import ModelDir, open_checkpoint
from lora_tool.checkpoints.opening import open_model
from lora_tool.verification.validating import validate
from tests.train.running import LLAMA, QWEN2, Trainings, overflowing, pairs, tiny_base

pytestmark = pytest.mark.filterwarnings("default")


def test_a_good_run_ends_without_a_word(train: Trainings) -> None:
    done = train("reward", model_name_or_path=str(QWEN2), rows=pairs(), dtype="auto")
    assert (done.code, done.status, done.report["findings"]) == (0, "done", [])
    assert "set lora_task_type: SEQ_CLS" in done.err
    saved = load_file(train.output / "adapter_model.safetensors")
    assert saved["base_model.model.score.weight"].shape == (1, 16)
    assert json.loads((train.output / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    report = validate(open_checkpoint(train.output), base=open_model(QWEN2), task="reward", deep=True)
    assert not report.findings
    record = json.loads((train.output / "lora_tool_train.json").read_text())
    assert (record["method"], record["task_type"], len(record["base"]["fingerprint"])) == ("reward", "SEQ_CLS", 64)
    assert str(QWEN2) not in str(record)


def test_float16_overflow_is_stopped_in_its_first_step(train: Trainings) -> None:
    base = overflowing(train.folder / "base")
    options = {"dtype": "float16", "logging_nan_inf_filter": True, "logging_steps": 10}
    done = train("reward", model_name_or_path=str(base), rows=pairs(), **options)
    assert (done.code, done.status, done.codes("error")) == (1, "stopped", {"nan-gradients"})
    assert "fp16-weights" in done.codes("warning")
    assert "float16" in done.error
    assert "dtype: auto" in done.hint
    assert "max_grad_norm" in done.hint
    assert not list(train.output.glob("*.safetensors"))


def test_its_twin_in_the_dtype_of_the_checkpoint_trains(train: Trainings) -> None:
    base = overflowing(train.folder / "base")
    done = train("reward", model_name_or_path=str(base), rows=pairs(), dtype="auto")
    assert (done.status, done.report["findings"]) == ("done", []), done.error


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "roberta"])
def test_heads_of_other_architectures(train: Trainings, tmp_path: Path, model_type: str) -> None:
    base, targets, head = other_base(tmp_path / "base", model_type)
    options = {"lora_target_modules": targets, "gradient_checkpointing": False}
    done = train("reward", model_name_or_path=str(base), rows=pairs(), **options)
    # the bias of a reward head gets no gradient, as the loss is of differences; that is no finding
    assert (done.status, done.report["findings"]) == ("done", []), done.error
    assert f"base_model.model.{head}.weight" in load_file(train.output / "adapter_model.safetensors")


def test_a_whole_model_can_be_trained(train: Trainings) -> None:
    whole = {"use_peft": False, "lora_r": ..., "lora_target_modules": ...}
    done = train("reward", model_name_or_path=str(QWEN2), rows=pairs(), **whole)
    assert (done.status, done.report["findings"]) == ("done", []), done.error
    assert isinstance(open_checkpoint(train.output), ModelDir)


def test_a_result_that_is_bad_is_kept_elsewhere(train: Trainings, monkeypatch: pytest.MonkeyPatch) -> None:
    save = PeftModel.save_pretrained

    def broken(self: PeftModel, folder: str, **how: Any) -> None:
        save(self, folder, **how)
        path = Path(folder) / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])

    monkeypatch.setattr(PeftModel, "save_pretrained", broken)
    done = train("reward", model_name_or_path=str(QWEN2), rows=pairs())
    assert (done.code, done.status) == (1, "bad-result"), done.error
    assert "the result is bad: LT" in done.err
    assert not list(train.output.glob("*.safetensors"))
    assert (train.output / "rejected" / "adapter_model.safetensors").is_file()


def other_base(to: Path, model_type: str) -> tuple[Path, list[str], str]:
    """Write a tiny base of another architecture; return it with its targets and the name of its head's last layer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    if model_type == "gpt2":
        return tiny_base(to, hf.GPT2Config(vocab_size=304, n_embd=32, n_layer=2, n_head=4)), [r".*\.c_attn"], "score"
    if model_type == "bert":
        hf.BertModel(hf.BertConfig(vocab_size=304, **sizes)).save_pretrained(to)
    else:
        hf.RobertaModel(hf.RobertaConfig(vocab_size=304, **sizes)).save_pretrained(to)
    hf.AutoTokenizer.from_pretrained(LLAMA).save_pretrained(to)
    return to, ["query", "value"], "classifier" if model_type == "bert" else "classifier.out_proj"
