"""Bases that are not stored as they are in memory, and adapters of other times, against PEFT's own merge, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file

from lora_tool import plan_merge
from lora_tool.checkpoints import open_model
from lora_tool.core.errors import FindingsFound, IncompatibleBase, MissingDependency, UnsupportedAdapter, WrongValue
from lora_tool.formats.adapter_config import ExpertLayout
from tests.oracle.adapter_cases import case
from tests.oracle.peft_merge import (
    BF16,
    FP32,
    changed,
    different,
    layout,
    load_model,
    merge_with_ours,
    require_pefts,
    save_adapter,
    save_base,
    saved_tensors,
)

# transformers and PEFT warn of tiny configs and of what a class leaves out: the merge is the test
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "rank_pattern": {"experts.down_proj": 3},
    "alpha_pattern": {"mlp.experts.gate_up_proj": 5},
}
ATTENTION = case(target_modules=["q_proj"])
MIXTRAL = case("mixtral", **EXPERTS)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_experts_of_every_layout(model_type: str, tmp_path: Path) -> None:
    """In float32 PEFT rounds a delta no more than we do, so all three precisions are one sum in other orders."""
    one = case(model_type, dtype=FP32, **EXPERTS)
    base, adapter = one.write(tmp_path)
    theirs = require_pefts(base, adapter, lambda: one.load(base))
    for precision in ("float32", "float64"):
        ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / precision, precision))
        assert layout(ours) == layout(theirs)
        for name, tensor in theirs.items():
            assert torch.allclose(ours[name], tensor, rtol=0, atol=2e-7), name


def test_layers_inside_a_module_whose_parameter_has_lora(tmp_path: Path) -> None:
    """PEFT calls them `mixer.base_layer.in_proj`, and its `merge_and_unload` leaves them as they are."""
    base = save_base(tmp_path / "base", "mamba", "causal-lm", BF16)
    lora = {"target_modules": ["in_proj", "dt_proj"], "target_parameters": ["mixer.A_log"], "bias": "lora_only", "r": 2}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)
    model.merge_adapter()
    state = {name.replace(".base_layer", ""): tensor for name, tensor in model.get_base_model().state_dict().items()}
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert not different(ours, {name: state[name] for name in ours})
    assert set(different(ours, saved_tensors(base))) == {
        f"backbone.layers.{layer}.mixer.{name}"
        for layer in range(2)
        for name in ("A_log", "in_proj.weight", "dt_proj.weight", "dt_proj.bias")
    }


def save_old_adapter(folder: Path, base: Path, targets: list[str], **fields: Any) -> Path:
    """Write an adapter as transformers 4 trained it: LoRA on linear layers of the names that the base has on disk."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=7, target_modules=targets, **fields)
    config.base_model_name_or_path = str(base)
    config.save_pretrained(str(folder))
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, weight in saved_tensors(base).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if weight.dim() == 2 and module.rpartition(".")[2] in targets:
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("model_type", "targets", "dtype"),
    [
        ("mixtral", ["q_proj", "w1", "w2", "w3"], BF16),
        ("mixtral", ["gate", "w1", "w2", "w3"], FP32),
        ("mixtral", ["w2"], BF16),
        ("qwen3_moe", ["o_proj", "gate_proj", "up_proj", "down_proj"], BF16),
        ("minimax", ["w1", "w2", "w3"], FP32),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_adapters_of_single_experts(model_type: str, targets: list[str], dtype: torch.dtype, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", model_type, "causal-lm", dtype)
    adapter = save_old_adapter(tmp_path / "adapter", base, targets)
    theirs = require_pefts(base, adapter, lambda: load_model(base, "causal-lm"))
    assert len(changed(saved_tensors(base), theirs)) == len(saved_tensors(adapter)) // 2


@pytest.mark.parametrize(
    ("model_type", "targets", "fields", "words"),
    [
        ("mixtral", ["w1", "w2", "w3"], {"use_rslora": True}, "use_rslora, rank_pattern or alpha_pattern"),
        ("deepseek_v3", ["gate_proj", "up_proj", "down_proj"], {}, "has no place for"),
    ],
)
def test_what_peft_merges_otherwise_than_it_was_trained_is_merged_in_our_own_arithmetic_alone(
    model_type: str, targets: list[str], fields: Mapping[str, Any], words: str, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", model_type, "causal-lm", FP32)
    adapter = save_old_adapter(tmp_path / "adapter", base, targets, **fields)
    with pytest.raises(UnsupportedAdapter, match=words):
        merge_with_ours(base, adapter, tmp_path / "refused", "peft")
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "float32"))
    weights, factors = saved_tensors(base), saved_tensors(adapter)
    scaling = 7 / 2 if fields else 7 / 4
    assert ours.keys() == weights.keys()
    for name, weight in weights.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = factors.get(f"{module}.lora_A.weight"), factors.get(f"{module}.lora_B.weight")
        expected = weight if a is None or b is None else weight + scaling * (b @ a)
        assert torch.allclose(ours[name], expected, rtol=0, atol=2e-7), name


def test_experts_without_lora_among_those_with_it_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral", "causal-lm", BF16)
    adapter = save_old_adapter(tmp_path / "adapter", base, ["w1", "w2", "w3"])
    kept = {name: tensor for name, tensor in saved_tensors(adapter).items() if "experts.3.w1" not in name}
    save_file(kept, adapter / "adapter_model.safetensors")
    with pytest.raises(FindingsFound, match=r"LT505 .*experts\.3\.w1`: `target_modules` names it"):
        merge_with_ours(base, adapter, tmp_path / "ours", "float32")


def grouped_by_expert(adapter: Path, experts: int, **fields: Any) -> None:
    """Turn an adapter that PEFT wrote into Unsloth's of before 2026-09, which packed lora_B by expert."""
    tensors = saved_tensors(adapter)
    for name, tensor in tensors.items():
        if ".experts." in name and "lora_B" in name:
            rank = tensor.shape[1] // experts
            turned = tensor.reshape(len(tensor), rank, experts).transpose(1, 2)
            tensors[name] = turned.reshape(len(tensor), -1).contiguous()
    save_file(tensors, adapter / "adapter_model.safetensors")
    raw = json.loads((adapter / "adapter_config.json").read_text())
    raw["auto_mapping"] = {"base_model_class": "MixtralForCausalLM", "unsloth_fixed": True}
    (adapter / "adapter_config.json").write_text(json.dumps({**raw, **fields}))


@pytest.mark.parametrize(
    ("fields", "choices", "precision"),
    [
        ({"lora_B_layout": "grouped_by_expert"}, {}, "peft"),
        ({}, {"expert_layout": ExpertLayout.GROUPED_BY_EXPERT}, "float32"),
    ],
    ids=["named by the config", "named by the user"],
)
def test_lora_b_grouped_by_expert(fields: Any, choices: Any, precision: str, tmp_path: Path) -> None:
    base, adapter = MIXTRAL.write(tmp_path)
    expected = saved_tensors(merge_with_ours(base, adapter, tmp_path / "expected", precision))
    grouped_by_expert(adapter, 4, **fields)
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", precision, **choices))
    assert not different(ours, expected)


@pytest.mark.parametrize(
    ("fields", "choices", "words"),
    [
        ({}, {}, "written by Unsloth"),
        ({"lora_B_layout": "sideways"}, {}, "expected rank_major or grouped_by_expert, found sideways"),
        ({"lora_B_layout": "rank_major"}, {"expert_layout": ExpertLayout.GROUPED_BY_EXPERT}, "was requested"),
    ],
)
def test_an_ambiguous_lora_b_is_refused(fields: Any, choices: Any, words: str, tmp_path: Path) -> None:
    base, adapter = MIXTRAL.write(tmp_path)
    grouped_by_expert(adapter, 4, **fields)
    with pytest.raises((UnsupportedAdapter, FindingsFound, WrongValue), match=words) as caught:
        merge_with_ours(base, adapter, tmp_path / "ours", "peft", **choices)
    assert caught.value.hint or fields


def test_a_size_that_contradicts_the_weights_is_a_finding(tmp_path: Path) -> None:
    """No table has Mixtral's tensors: transformers says what its config means."""
    base, adapter = case("mixtral", target_modules=["q_proj"]).write(tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    words = r"experts\.gate_up_proj`: is \[4, 96, 32\] in the weights of .*w1\.weight` and 7 more, .* \[4, 80, 32\]"
    with pytest.raises(FindingsFound, match=f"LT317 .*{words}"):
        plan_merge(base, adapter)
    with pytest.raises(IncompatibleBase, match="in the weights of"):  # nothing can be computed all the same
        plan_merge(base, adapter, ignore=["LT317"])


def test_a_head_that_nobody_saved_is_refused(tmp_path: Path) -> None:
    base, adapter = case("qwen2", base_task="feature-extraction", target_modules=["q_proj"]).write(tmp_path)
    with pytest.raises(FindingsFound, match=r"LT515 .* has no `lm_head.weight`"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft")


def test_the_code_that_a_config_names_is_neither_run_nor_named_again(tmp_path: Path) -> None:
    base, adapter = ATTENTION.write(tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "modeling.Bad"}}))
    (base / "modeling.py").write_text("raise SystemExit('the checkpoint ran its code')")
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft")
    assert "auto_map" not in json.loads((ours / "config.json").read_text())
    assert load_model(ours, "causal-lm")


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = MIXTRAL.write(tmp_path)
    monkeypatch.setattr(
        "lora_tool.core.errors.find_spec", lambda package: None if package == "transformers" else package
    )
    with pytest.raises(MissingDependency, match="transformers is not installed") as caught:
        merge_with_ours(base, adapter, tmp_path / "ours", "float32")
    assert "[merge]'" in str(caught.value.hint)


def test_no_fused_layer_is_one_step(tmp_path: Path) -> None:
    """The largest thing that a step reads is one expert's matrix, whatever the layer's size in memory."""
    base, adapter = MIXTRAL.write(tmp_path)
    plan = plan_merge(base, adapter)
    disk = open_model(base).tensors
    for step in plan.steps:
        assert step.op.source.spec == replace(disk[step.out.name].spec, name=step.op.source.name)
        assert step.op.source == disk[step.out.name]
