"""Untouched models under configs that a table of their class may not cover: no error is found in them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lora_tool import plan_merge, validate
from lora_tool.core.errors import FindingsFound, MissingDependency
from lora_tool.core.report import Severity
from lora_tool.formats.model_config import read_model_config
from lora_tool.models import model_tensors
from lora_tool.models.mapping import class_tensors
from lora_tool.models.model_tensors import why_unsure
from tests.mutations import FIXTURES
from tests.oracle.tiny import Task, tiny_model

_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_TENSORS = {"LT310", "LT317", "LT318", "LT319"}
UNTOUCHED: tuple[tuple[str, Task, dict[str, Any]], ...] = (
    ("gemma4", "causal-lm", {"audio_config": None}),
    ("gemma4", "causal-lm", {"text_config": _SHARED | {"use_double_wide_mlp": True}, "vision_config": None}),
    ("gemma4", "causal-lm", {"text_config": _MOE, "vision_config": None, "audio_config": None}),
    ("gemma4", "causal-lm", {"text_config": _MOE, "audio_config": None}),
    ("gemma4_text", "causal-lm", {**_MOE, **_SHARED}),
    ("mamba2", "causal-lm", {"num_heads": 8, "head_dim": 8, "state_size": 24, "n_groups": 4}),
    ("squeezebert", "seq-cls", {"hidden_size": 64, "embedding_size": 64, "intermediate_size": 96, "q_groups": 2}),
    ("granitemoe_swa", "causal-lm", {"shared_intermediate_size": 40}),
    ("canine", "seq-cls", {"num_hash_functions": 4}),
    ("git", "causal-lm", {"num_image_with_embedding": 6}),
    ("umt5", "seq-cls", {"feed_forward_proj": "relu"}),
    ("deberta-v2", "seq-cls", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    ("gemma3", "image-text-to-text", {"tie_word_embeddings": False}),
    ("layoutlmv3", "token-cls", {"num_labels": 12}),
    ("layoutlmv3", "token-cls", {"num_labels": 3}),
    ("flaubert", "seq-cls", {"summary_use_proj": False}),
    ("stablelm", "causal-lm", {"qk_layernorm": True, "num_attention_heads": 32}),
    ("qwen2", "causal-lm", {"num_attention_heads": 5}),
    ("marian", "causal-lm", {"decoder_vocab_size": 80}),
    ("t5gemma", "seq-2-seq-lm", {"vocab_size": 80}),
    ("blip-2", "image-text-to-text", {"text_config": {"word_embed_proj_dim": 64}}),
)


def saved(folder: Path, model_type: str, task: Task, change: dict[str, Any]) -> Path:
    tiny_model(model_type, task, **change).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("model_type", "task", "change"), UNTOUCHED, ids=lambda value: str(value)[:40])
def test_nothing_is_wrong_with_an_untouched_model(
    model_type: str, task: Task, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = validate(saved(tmp_path, model_type, task, change))
    assert [each for each in report.findings if each.severity is Severity.ERROR or each.code in _TENSORS] == []
    monkeypatch.setattr(class_tensors, "require_packages", not_installed)
    assert [each for each in validate(tmp_path).findings if each.code in _TENSORS] == []


def test_transformers_is_asked_where_the_table_is_not_sure(tmp_path: Path) -> None:
    saved(tmp_path, "canine", "seq-cls", {"num_hash_functions": 2})
    assert "num_hash_functions" in (why_unsure(read_model_config(tmp_path / "config.json")) or "")
    tensors = load_file(tmp_path / "model.safetensors")
    [lost] = (name for name in tensors if name.endswith("projection.conv.weight"))
    [wrong] = (name for name in tensors if name.endswith("projection.LayerNorm.bias"))
    del tensors[lost]
    tensors[wrong] = tensors[wrong][:-1].clone()
    tensors["canine.stranger.weight"] = tensors[wrong].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {(each.code, each.subject) for each in validate(tmp_path).findings if each.code in _TENSORS}
    assert ("LT317", wrong) in found
    tensors[wrong] = load_file(tmp_path / "model.safetensors")[wrong].new_zeros(32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = {(each.code, each.subject) for each in validate(tmp_path).findings if each.code in _TENSORS}
    assert found == {("LT318", lost), ("LT319", "canine.stranger.weight")}


def not_installed(_packages: object, *, extra: str) -> None:
    raise MissingDependency("transformers", extra=extra)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("changed", ["attention_bias", "attention_bias mlp_bias"])
def test_a_table_that_may_be_wrong_does_not_refuse(
    changed: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = FIXTURES / "causal-llama/base", FIXTURES / "causal-llama/adapter"
    row = model_tensors._row("llama") or {}
    wrong = {"always": ["@layers.*.self_attn.no_such.weight", *row["always"]], "sampled": {"true false": changed}}
    monkeypatch.setattr(model_tensors, "_row", lambda _: {**row, **wrong})
    if not installed:
        monkeypatch.setattr(class_tensors, "require_packages", not_installed)
    found = {each.code: each for each in validate(adapter, base=base).findings if each.code == "LT515"}
    of_base = {each.code: each for each in validate(base).findings if each.code == "LT318"}
    if installed:
        assert not found | of_base
        return
    doubted = " " in changed  # it was made with each change, but not with both
    assert found["LT515"].severity is of_base["LT318"].severity is (Severity.WARNING if doubted else Severity.ERROR)
    for each in (*found.values(), *of_base.values()) if doubted else ():
        assert "`attention_bias` and `mlp_bias` together; transformers is not installed" in each.message
    with contextlib.nullcontext() if doubted else pytest.raises(FindingsFound, match="LT515"):
        plan_merge(base, adapter)
    plan_merge(base, adapter, ignore=("LT515",))


def test_the_check_is_skipped_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "canine", "seq-cls", {"num_hash_functions": 2})
    monkeypatch.setattr(class_tensors, "require_packages", not_installed)
    report = validate(tmp_path)
    assert not [each for each in report.findings if each.code in _TENSORS]
    reasons = {each.code: each.reason for each in report.skipped}
    for code in ("LT317", "LT318", "LT319"):
        assert "does not cover the `num_hash_functions`" in reasons[code]
        assert "transformers is not installed: pip install" in reasons[code]
