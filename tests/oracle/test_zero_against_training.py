"""Consolidated checkpoints against what the training itself gathered: values, types and names, and the rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lora_tool import plan_merge
from lora_tool.checkpoints import ShardedDir, open_checkpoint, open_sharded
from lora_tool.core import keys
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.verification.validating import validate

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
ZERO = FIXTURES / "zero"
BASE = FIXTURES / "reward-qwen2" / "base"
ALL = sorted(folder.name for folder in ZERO.iterdir() if folder.is_dir())
REWARD = ["stage0-reward", "stage1-reward", "stage2-reward", "stage3-reward", "stage3-hpz", "stage3-frozen-head"]
OLDER = ["stage1-reward-0.14.4", "stage3-reward-0.16.9"]
"""Trained with older versions of DeepSpeed, as their names say."""


def opened(name: str) -> ShardedDir:
    checkpoint = open_sharded(ZERO / name)
    assert isinstance(checkpoint, ShardedDir)
    return checkpoint


def rewards(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model.eval()(input_ids=torch.tensor(prompts)).logits.squeeze(-1)
    return scores


def trained_rewards(name: str) -> tuple[list[list[int]], torch.Tensor]:
    told = json.loads((ZERO / name / "rewards.json").read_text())
    return told["prompts"], torch.tensor(told["rewards"])


@pytest.mark.parametrize("name", ALL)
def test_the_state_is_what_was_trained(tmp_path: Path, name: str) -> None:
    execute(plan_consolidate(opened(name), what="state"), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(ZERO / name / "truth.safetensors")
    if name == "stage3-headless":  # saved without its frozen parameters
        truth = {key: tensor for key, tensor in truth.items() if ".lora_" in key}
    assert found.keys() == truth.keys()
    for key, tensor in truth.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", [*REWARD, *OLDER, "stage3-saved"])
def test_the_adapter_gives_the_trained_rewards(tmp_path: Path, name: str) -> None:
    execute(plan_consolidate(opened(name)), tmp_path / "adapter")
    torch.manual_seed(99)  # another random head than in training
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, pad_token_id=0, dtype=torch.float32)
    prompts, expected = trained_rewards(name)
    before = rewards(base, prompts)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert not torch.allclose(before, expected, atol=0.1)
    torch.testing.assert_close(rewards(model, prompts), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["stage2-reward", "stage3-saved"])
def test_the_merged_model_gives_the_trained_rewards(tmp_path: Path, name: str) -> None:
    execute(plan_consolidate(opened(name)), tmp_path / "adapter")
    plan = plan_merge(open_checkpoint(BASE), open_checkpoint(tmp_path / "adapter"), task="reward")
    execute(plan, tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    prompts, expected = trained_rewards(name)
    assert merged.config.num_labels == 1
    # the merged weights are rounded to the base's bfloat16
    torch.testing.assert_close(rewards(merged, prompts), expected, atol=0.02, rtol=0.01)


@pytest.mark.parametrize("name", ["stage2-reward", "stage3-reward"])
def test_peft_loads_every_tensor_of_the_adapter(tmp_path: Path, name: str) -> None:
    execute(plan_consolidate(opened(name)), tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, pad_token_id=0, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    held = {keys.parse(key).canonical: tensor for key, tensor in model.state_dict().items()}
    for key, tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items():
        assert torch.equal(held[key].to(tensor.dtype), tensor), key


def test_a_head_without_lora_goes_into_modules_to_save(tmp_path: Path) -> None:
    execute(plan_consolidate(opened("stage3-frozen-head")), tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["modules_to_save"] == ["score"]
    assert Path(written["base_model_name_or_path"]).samefile(BASE), "the relative path is no longer true here"
    assert validate(open_checkpoint(tmp_path / "adapter"), base=open_checkpoint(BASE)).worst is not Severity.ERROR


@pytest.mark.parametrize("name", ["stage3-reward", "stage2-reward", "stage3-hpz"])
def test_validate_is_content_with_a_rescued_adapter(tmp_path: Path, name: str) -> None:
    execute(plan_consolidate(opened(name)), tmp_path / "adapter")
    report = validate(open_checkpoint(tmp_path / "adapter"), base=open_checkpoint(BASE), deep=True)
    assert report.worst is not Severity.ERROR, report.findings


def test_an_adapter_without_its_head_is_refused_with_the_reason() -> None:
    with pytest.raises(FindingsFound, match="LT415 .*`score`: the head is lost: LoRA was put on it"):
        plan_consolidate(opened("stage3-headless"))


@pytest.mark.parametrize("name", ["stage3-full", "stage2-tied", "stage1-bf16-optimizer"])
def test_the_model_loads_in_transformers(tmp_path: Path, name: str) -> None:
    execute(plan_consolidate(opened(name)), tmp_path / "model")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    truth = load_file(ZERO / name / "truth.safetensors")
    for key, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, truth[key]), key


def test_a_smaller_type_is_rounded_once(tmp_path: Path) -> None:
    from lora_tool.core.tensors import DType

    execute(plan_consolidate(opened("stage3-full"), dtype=DType.BF16, max_shard_size=4000), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    truth = load_file(ZERO / "stage3-full" / "truth.safetensors")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, truth[key].bfloat16()), key


def test_padding_is_never_read() -> None:
    """Spans hold as many bytes as the tensors, so none is left for padding."""
    plan = plan_consolidate(opened("stage3-full"), what="state")
    used = sum(span.nbytes for step in plan.steps for span in step.op.source.spans)
    assert used == plan.data_bytes


def test_of_several_tags_latest_is_taken() -> None:
    newest = plan_consolidate(opened("stage2-tied"))
    older = plan_consolidate(opened("stage2-tied"), tag="global_step1")
    assert newest.manifest["inputs"]["checkpoint"]["global_steps"] == 2
    assert older.manifest["inputs"]["checkpoint"]["global_steps"] == 1
