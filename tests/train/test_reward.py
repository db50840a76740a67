"""Trap 1: a reward model with LoRA. The wrong task type loses the head; float16 overflows and shows loss 0.0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from lora_tool.checkpoint import ModelDir, open_checkpoint
from lora_tool.checkpoint.opening import open_model
from lora_tool.validation.validating import validate
from tests.train.running import LLAMA, QWEN2, Trainings, codes, overflowing, pairs, tiny_base

pytestmark = pytest.mark.filterwarnings("default")


def test_a_good_run_ends_without_a_word(train: Trainings) -> None:
    outcome = train("reward", model_name_or_path=str(QWEN2), rows=pairs(), dtype="auto")
    assert (outcome.status.value, outcome.findings) == ("done", ())
    saved = load_file(train.output / "adapter_model.safetensors")
    assert saved["base_model.model.score.weight"].shape == (1, 16)
    assert json.loads((train.output / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    report = validate(open_checkpoint(train.output), base=open_model(QWEN2), task="reward", deep=True)
    assert not report.findings
    record = json.loads((train.output / "lora_tool_train.json").read_text())
    assert (record["head"], record["num_labels"], record["task_type"]) == ("score", 1, "SEQ_CLS")
    logged = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged[:4]] == [1, 2, 3, 4]


@pytest.mark.parametrize("task", ["CAUSAL_LM", None, "TOKEN_CLS"])
def test_another_task_type_is_refused(train: Trainings, task: str | None) -> None:
    outcome = train("reward", model_name_or_path=str(QWEN2), rows=pairs(), lora_task_type=task)
    assert outcome.status.value == "refused"
    (found,) = outcome.findings
    assert found.code == "task-type"
    assert "head" in found.message
    assert found.hint is not None
    assert found.hint.startswith("lora_task_type: SEQ_CLS")


@pytest.mark.parametrize("filtered", [..., True])
def test_float16_overflow_is_stopped_in_its_first_step(train: Trainings, filtered: object) -> None:
    base = overflowing(train.folder / "base")
    outcome = train(
        "reward",
        model_name_or_path=str(base),
        rows=pairs(),
        dtype="float16",
        logging_nan_inf_filter=filtered,
        logging_steps=10,
    )
    assert outcome.status.value == "stopped"
    assert codes(outcome, "error") == {"nan-gradients"}
    assert "fp16-weights" in codes(outcome, "warning")
    assert outcome.error is not None
    assert "float16" in outcome.error
    assert outcome.hint is not None
    assert "dtype: auto" in outcome.hint
    assert "max_grad_norm" in outcome.hint
    assert not list(train.output.glob("*.safetensors"))
    assert '"guard/nan-gradients": 1.0' in (train.output / "metrics.jsonl").read_text()


def test_its_twin_in_the_dtype_of_the_checkpoint_trains(train: Trainings) -> None:
    base = overflowing(train.folder / "base")
    outcome = train("reward", model_name_or_path=str(base), rows=pairs(), dtype="auto")
    assert (outcome.status.value, outcome.findings) == ("done", ())


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "roberta"])
def test_heads_of_other_architectures(train: Trainings, tmp_path: Path, model_type: str) -> None:
    base, targets, head = other_base(tmp_path / "base", model_type)
    outcome = train(
        "reward", model_name_or_path=str(base), rows=pairs(), lora_target_modules=targets, gradient_checkpointing=False
    )
    # the bias of a reward head gets no gradient, as the loss is of differences; that is no finding
    assert (outcome.status.value, outcome.findings) == ("done", ())
    assert (outcome.facts["head"], outcome.facts["num_labels"]) == (head, 1)


def test_a_whole_model_can_be_trained(train: Trainings) -> None:
    whole = {"use_peft": False, "lora_r": ..., "lora_target_modules": ...}
    outcome = train("reward", model_name_or_path=str(QWEN2), rows=pairs(), **whole)
    assert (outcome.status.value, outcome.findings) == ("done", ())
    assert (outcome.facts["head"], outcome.facts["num_labels"]) == ("score", 1)
    assert isinstance(open_checkpoint(train.output), ModelDir)


def other_base(to: Path, model_type: str) -> tuple[Path, list[str], str]:
    """Write a tiny base of another architecture; return it with its targets and the name of its head's last layer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    if model_type == "gpt2":
        return tiny_base(to, hf.GPT2Config(vocab_size=304, n_embd=32, n_layer=2, n_head=4)), ["c_attn"], "score"
    if model_type == "bert":
        hf.BertModel(hf.BertConfig(vocab_size=304, **sizes)).save_pretrained(to)
    else:
        hf.RobertaModel(hf.RobertaConfig(vocab_size=304, **sizes)).save_pretrained(to)
    hf.AutoTokenizer.from_pretrained(LLAMA).save_pretrained(to)
    return to, ["query", "value"], "classifier" if model_type == "bert" else "classifier.out_proj"
