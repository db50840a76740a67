"""Adapters of the text class that `AutoModelForCausalLM` makes of a multimodal checkpoint, merged into the whole model.

The language weights are PEFT's merge of the text class, bit by bit; what the text class does not have is the base's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, TaskType
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextForSequenceClassification,
    PreTrainedModel,
    Qwen3_5TextForSequenceClassification,
)

from lora_tool import prepare, verify
from lora_tool.core.errors import UnsupportedAdapter
from tests.judging import codes, judge
from tests.oracle.adapter_cases import experts
from tests.oracle.peft_merge import (
    different,
    layout,
    load_model,
    merge_with_ours,
    require_pefts,
    save_model,
    saved_tensors,
    train,
)
from tests.oracle.tiny import AUTO, tiny_model
from tests.quantised_models import quantise

# transformers and PEFT warn of tiny configs and of the vision that a text class leaves out: the merge is the test
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = ("qwen3_5", "qwen3_5_moe", "llama4", "mllama", "qwen4_exp")
LAYER = {"target_modules": ["q_proj", "down_proj"]}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "values by the text class's paths": {
        **LAYER,
        "alpha_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 64},
        "rank_pattern": {"^model.layers.0.mlp.down_proj": 2},
    },
    "DoRA": {**LAYER, "use_dora": True},
    "a saved output layer": {**LAYER, "modules_to_save": ["lm_head"]},
    "LoRA on both ends": {"target_modules": ["lm_head", "embed_tokens"]},
    "trained tokens": {**LAYER, "trainable_token_indices": {"embed_tokens": [3, 7]}},
}


def save_whole(folder: Path, model_type: str, **overrides: Any) -> Path:
    return save_model(tiny_model(model_type, "image-text-to-text", **overrides), folder, shard="40KB")


def load_text(base: Path) -> PreTrainedModel:
    return load_model(base, "causal-lm")


def save_adapter(model: PreTrainedModel, folder: Path, **lora: Any) -> Path:
    train(model, folder, save=False, **{"task_type": "CAUSAL_LM", **lora})
    return folder


def require_pefts_in_the_whole(base: Path, adapter: Path, out: Path) -> None:
    merge_with_ours(base, adapter, out, "peft")
    verify(out).raise_for_errors()
    ours, before = saved_tensors(out), saved_tensors(base)
    assert layout(ours) == layout(before)
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    theirs = theirs_in_memory(base, adapter)
    held = load_text(out).state_dict()
    assert not different(held, theirs)
    changed = different(ours, before)
    assert changed
    assert not [name for name in changed if "vision" in name or "visual" in name or "projector" in name]
    whole = AUTO["image-text-to-text"].from_pretrained(out, dtype="auto")
    assert type(whole).__name__ in (base / "config.json").read_text()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_language_is_pefts_alone_and_in_the_whole(model_type: str, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", model_type)
    text = load_text(base)
    parameters = experts(text) or None
    adapter = save_adapter(text, tmp_path / "adapter", target_modules="all-linear", target_parameters=parameters)
    require_pefts_in_the_whole(base, adapter, tmp_path / "whole")
    require_pefts(base, adapter, lambda: load_text(base), text_only=True)
    configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("ours", "theirs")]
    assert configs[0] == {**configs[1], "transformers_version": configs[0]["transformers_version"]}
    loaded, info = type(text).from_pretrained(tmp_path / "ours", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not different(loaded.state_dict(), theirs_in_memory(base, adapter))
    for folder in ("ours", "theirs"):
        verify(tmp_path / folder, base=base, adapters=[adapter]).raise_for_errors()


def test_experts_that_are_stored_fused(tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", "qwen3_5_moe")
    fused = load_model(base, "image-text-to-text").state_dict()
    for path in base.glob("model*"):
        path.unlink()
    save_file({name: tensor.clone() for name, tensor in fused.items()}, base / "model.safetensors", {"format": "pt"})
    text = load_text(base)
    adapter = save_adapter(
        text, tmp_path / "adapter", target_modules="all-linear", target_parameters=experts(text), lora_dropout=0.0
    )
    judged_as_in_memory(base, adapter)
    require_pefts_in_the_whole(base, adapter, tmp_path / "ours")


def test_names_that_the_whole_model_has_too(tmp_path: Path) -> None:
    """The language model of dots3_note has the same names in both: what the targets name tells which was trained."""
    vision = {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32}
    sizes = {
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
        "text_config": {"num_key_value_heads": 4},
    }
    wide = save_whole(tmp_path / "wide", "dots3_note", vision_config={**vision, "num_local_experts": 4}, **sizes)
    base = tmp_path / "base"
    AUTO["image-text-to-text"].from_pretrained(wide, dtype="auto").save_pretrained(base)  # some are float32 on loading
    adapter = save_adapter(load_text(base), tmp_path / "adapter", target_modules=["q_a_proj", "down_proj"])
    require_pefts_in_the_whole(base, adapter, tmp_path / "ours")


@pytest.mark.parametrize(
    ("model_type", "form"),
    [("llama4", "the text in the whole"), ("qwen3_5", "the text alone"), ("qwen3_5", "the whole")],
)
def test_the_answers_are_those_of_base_and_adapter(model_type: str, form: str, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", model_type)
    model = load_model(base, "image-text-to-text") if form == "the whole" else load_text(base)
    adapter = save_adapter(model, tmp_path / "adapter", **LAYER)
    out = merge_with_ours(base, adapter, tmp_path / "ours", "float32", text_only=form == "the text alone")
    verification = verify(out, logits=True)
    verification.raise_for_errors()
    assert verification.outputs is not None
    assert verification.outputs.explained
    assert verification.outputs.explained_largest < 0.1  # so that another model's answers would not be


def test_the_text_model_of_a_quantised_base_loads_as_one(tmp_path: Path) -> None:
    whole = save_whole(tmp_path / "whole", "qwen3_5")
    base, _ = quantise(whole, tmp_path / "base", "nf4-double", lambda module: module.endswith("q_proj"))
    adapter = save_adapter(load_text(whole), tmp_path / "adapter", **LAYER)
    out = merge_with_ours(base, adapter, tmp_path / "ours", "float32", text_only=True)
    merged, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert (type(merged).__name__, merged.config.model_type) == ("Qwen3_5ForCausalLM", "qwen3_5_text")


@pytest.mark.parametrize("text_only", [False, True], ids=["the whole", "the text alone"])
def test_a_reward_head_on_the_text_model(text_only: bool, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", "qwen3_5")
    text = Qwen3_5TextForSequenceClassification.from_pretrained(base, dtype="auto", num_labels=1)
    adapter = save_adapter(text, tmp_path / "adapter", **LAYER, task_type=TaskType.SEQ_CLS)
    tokenizer = {"pad_token": "<pad>", "added_tokens_decoder": {"5": {"content": "<pad>", "special": True}}}
    (adapter / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    judged_as_in_memory(base, adapter)
    out = merge_with_ours(base, adapter, tmp_path / "ours", "peft", text_only=text_only)
    loaded = type(text).from_pretrained(base, dtype="auto", num_labels=1)
    theirs = PeftModel.from_pretrained(loaded, adapter).merge_and_unload().state_dict()
    merged, info = AutoModelForSequenceClassification.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert type(merged).__name__ == f"Qwen3_5{'Text' if text_only else ''}ForSequenceClassification"
    ours = type(text).from_pretrained(out, dtype="auto", num_labels=1)
    assert not different(ours.state_dict(), dict(theirs))
    if not text_only:
        written, before = layout(saved_tensors(out)), layout(saved_tensors(base))
        assert {name for name in written if written[name] != before.get(name)} == {"score.weight"}
        assert before.keys() - written.keys() == {"lm_head.weight"}
    with torch.no_grad():
        scores = merged(torch.tensor([[7, 8, 9, 10], [7, 8, 5, 5]])).logits  # two texts, one of them padded
        assert torch.allclose(scores[1], merged(torch.tensor([[7, 8]])).logits[0], atol=0.02)
    verification = verify(out, logits=True)
    verification.raise_for_errors()
    assert verification.outputs is not None
    assert verification.outputs.explained


def test_a_text_classifier_that_transformers_cannot_load_is_refused(tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", "gemma3")
    text = Gemma3TextForSequenceClassification.from_pretrained(base, num_labels=1)
    adapter = save_adapter(text, tmp_path / "adapter", **LAYER, task_type=TaskType.SEQ_CLS)
    with pytest.raises(UnsupportedAdapter, match="Gemma3TextForSequenceClassification, .* re-initialises"):
        merge_with_ours(base, adapter, tmp_path / "ours", "float32")


def theirs_in_memory(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    merged: PreTrainedModel = PeftModel.from_pretrained(load_text(base), adapter).merge_and_unload()
    return dict(merged.state_dict())


def test_a_base_without_a_text_class_is_not_cut(tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", "qwen3_vl")
    adapter = save_adapter(AUTO["image-text-to-text"].from_pretrained(base), tmp_path / "adapter", **LAYER)
    with pytest.raises(UnsupportedAdapter, match="no class for the text model of a qwen3_vl alone"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft", text_only=True)


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4", "mllama"])
def test_names_alone_tell_the_text_class(model_type: str, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", model_type)
    adapter = save_adapter(load_text(base), tmp_path / "adapter", **LAYER)
    judged_as_in_memory(base, adapter)
    file = adapter / "adapter_model.safetensors"
    good = load_file(file)
    injuries: Mapping[str, Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]] = {
        "LT501": lambda name, tensor: (name.replace("mlp", "ffn").replace("feed_forward", "ffn"), tensor),
        "LT502": lambda name, tensor: (name, tensor[:-1].clone() if "down_proj.lora_B" in name else tensor),
        "LT503": lambda name, tensor: (name.replace("layers.1.", "layers.9."), tensor),
    }
    for code, injury in injuries.items():
        save_file(dict(injury(name, tensor) for name, tensor in good.items()), file)
        assert code in codes(judge(adapter, base=base))
    save_file({name: tensor for name, tensor in good.items() if "layers.1.self_attn" not in name}, file)
    assert "LT505" in codes(judge(adapter, base=base))


def judged_as_in_memory(base: Path, adapter: Path) -> None:
    report = judge(adapter, base=base)
    assert not codes(report)
    no_table = {"LT515"}  # of a model type without a table of its tensors
    assert {skipped.code for skipped in report.skipped if skipped.code.startswith("LT5")} <= no_table


@pytest.mark.parametrize("feature", FEATURES)
def test_what_an_adapter_may_have_besides(feature: str, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", "qwen3_5")
    adapter = save_adapter(load_text(base), tmp_path / "adapter", **FEATURES[feature])
    require_pefts_in_the_whole(base, adapter, tmp_path / "ours")


def test_tied_ends_stay_tied(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    base = save_whole(tmp_path / "base", "qwen3_5", **tied, text_config=tied)
    assert "lm_head.weight" not in saved_tensors(base)
    adapter = save_adapter(load_text(base), tmp_path / "adapter", **LAYER)
    require_pefts_in_the_whole(base, adapter, tmp_path / "ours")


def test_a_text_class_that_transformers_cannot_load_is_refused(tmp_path: Path) -> None:
    small = {"base_channels": 32, "num_res_blocks": 1, "channel_multiplier": [1, 1], "hidden_size": 32}
    sizes = {**small, "z_channels": 32, "embed_dim": 32, "attn_resolutions": []}
    base = save_whole(tmp_path / "base", "emu3", vq_config=sizes, vocabulary_map={"image": 1})
    adapter = save_adapter(load_text(base), tmp_path / "adapter", **LAYER)
    with pytest.raises(UnsupportedAdapter, match="cannot load one from it: it re-initialises"):
        merge_with_ours(base, adapter, tmp_path / "ours", "float32")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_prepared_for_vllm_is_on_the_same_modules_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    base = save_whole(tmp_path / "base", model_type)
    adapter = save_adapter(load_text(base), tmp_path / "adapter", **FEATURES["values by the text class's paths"])
    out = prepare(adapter, "vllm", base=base, out=tmp_path / "out").path
    assert not verify(out).report.findings
    whole = AUTO["image-text-to-text"].from_pretrained(base, dtype=torch.float32)
    ours, theirs = deltas_of(whole, out), deltas_of(load_text(base).float(), adapter)
    names = {
        name: next(path for path in ours if path.endswith(name.partition("layers.")[2]) and "vision" not in path)
        for name in theirs
    }
    for name, delta in theirs.items():
        assert float((ours[names[name]] - delta).norm()) <= 2e-7 * float(delta.norm()), name


def deltas_of(model: PreTrainedModel, adapter: Path) -> dict[str, torch.Tensor]:
    """Return what PEFT computes as the ΔW of every module."""
    loaded: Any = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).double()
    layers = {name: layer for name, layer in loaded.named_modules() if hasattr(layer, "get_delta_weight")}
    return {name: layer.get_delta_weight("default").detach() for name, layer in layers.items()}
