"""Experts in stacks, as fbgemm and modelopt quantise those of Llama 4: left as they are, merged, and stored again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_tool import verify
from lora_tool.core.errors import UnsupportedAdapter
from tests.oracle.peft_merge import different, merge_with_ours, save_adapter, save_base, saved_tensors
from tests.quantised_models import STACKS, quantise

BF16 = torch.bfloat16
SIZES = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 16}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ON_EXPERTS: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | {
    "target_parameters": [f"layers.1.feed_forward.{name}" for name in EXPERTS]
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("plain") / "base", "llama4_text", "causal-lm", BF16, **SIZES)


@pytest.fixture(scope="module")
def on_experts(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter") / "adapter", plain, "causal-lm", ON_EXPERTS)


def merged_by_peft(plain: Path, values: dict[str, torch.Tensor], adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the base with these numbers in float64, merged by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64)
    model.load_state_dict({**model.state_dict(), **values})
    found: dict[str, torch.Tensor] = PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()
    return found


@pytest.mark.parametrize("store", ["all-16bit", "touched-16bit"])
@pytest.mark.parametrize("form", STACKS)
def test_lora_on_stacks_is_added_to_the_numbers(
    form: str, store: str, plain: Path, on_experts: Path, tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", form, lambda module: module.endswith(EXPERTS))
    merged = merge_with_ours(base, on_experts, tmp_path / "merged", "float32", store=store)
    before, after, wanted = saved_tensors(base), saved_tensors(merged), merged_by_peft(plain, values, on_experts)
    touched = {name for name in values if ".layers.1." in name}
    for name in values if store == "all-16bit" else touched:
        apart = after[name].view(torch.int16).int() - wanted[name].to(BF16).view(torch.int16).int()
        assert int(apart.abs().max()) <= 1
        assert float((apart != 0).float().mean()) < 0.005
    left = {name for name in before if ".layers.0." in name and "experts" in name}
    if store == "all-16bit":
        assert after.keys() == saved_tensors(plain).keys()
        _, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
        assert not any(info.values())
    else:
        assert left
        assert not different({name: before[name] for name in left}, {name: after[name] for name in left})
        assert not any("layers.1." in name and "scale" in name for name in after)
        table = json.loads((merged / "config.json").read_text())["quantization_config"]
        assert any(
            "layers.1.feed_forward.experts" in each for each in table.get("ignore") or table["modules_to_not_convert"]
        )
    assert not verify(merged).report.findings


def test_stacks_with_scales_of_outputs_are_stored_again(plain: Path, on_experts: Path, tmp_path: Path) -> None:
    base, values = quantise(plain, tmp_path / "base", "stack-fbgemm", lambda module: module.endswith(EXPERTS))
    merged = merge_with_ours(base, on_experts, tmp_path / "merged", "float32", store="as-base", allow_loss=True)
    after, wanted = saved_tensors(merged), merged_by_peft(plain, values, on_experts)
    for name in values:
        scales = after[f"{name}_scale"].reshape(len(after[name]), 1, -1)
        found = after[name].double() * scales.double()
        assert after[name].dtype is torch.float8_e4m3fn
        # half a step of codes is at most 2^-4 of a value, and 2^-10 of a scale
        assert bool((found - wanted[name]).abs().le(wanted[name].abs() / 16 + scales.double() / 1024).all())
    assert not verify(merged).report.findings


@pytest.mark.parametrize(
    ("form", "words"), [("stack-fp8", "one scale for all of its matrices"), ("stack-nvfp4", "four bits")]
)
def test_what_a_stack_cannot_be_stored_as_is_refused(
    form: str, words: str, plain: Path, on_experts: Path, tmp_path: Path
) -> None:
    base, _ = quantise(plain, tmp_path / "base", form, lambda module: module.endswith(EXPERTS))
    with pytest.raises(UnsupportedAdapter, match=words):
        merge_with_ours(base, on_experts, tmp_path / "merged", "float32", store="as-base", allow_loss=True)
