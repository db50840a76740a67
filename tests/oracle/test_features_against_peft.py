"""DoRA, trained biases, embeddings and tokens against PEFT's own merge: the saved files, name by name and bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.peft_merge import (
    different,
    layout,
    merge_with_ours,
    merge_with_peft,
    save_adapter,
    save_base,
    saved_tensors,
)

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}),
    "dora-rslora": ("qwen2", {"use_dora": True, "use_rslora": True, "lora_alpha": 7}),
    "dora-conv1d": ("gpt2", {"use_dora": True, "fan_in_fan_out": True}),
    "embedding-untied": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-rslora-non-power-of-two": ("llama", {"target_modules": ["embed_tokens"], "r": 6, "use_rslora": True}),
    "embedding-and-lm-head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "embedding-gpt2-positions": ("gpt2", {"target_modules": ["wpe", "c_attn"], "fan_in_fan_out": True}),
    "tokens-untied": ("llama", {"trainable_token_indices": [1, 5, 3]}),
    "tokens-tied": ("qwen2-tied", {"trainable_token_indices": {"embed_tokens": [0, 2]}}),
    "saved-embedding-untied": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved-embedding-of-tied": ("qwen2-tied", {"modules_to_save": ["embed_tokens"]}),
    "saved-lm-head-of-tied": ("qwen2-tied", {"modules_to_save": ["lm_head"]}),
    "saved-both-of-tied": ("qwen2-tied", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "bias-all": ("qwen2", {"bias": "all"}),
    "bias-lora-only": ("qwen2", {"bias": "lora_only", "target_modules": ["q_proj", "v_proj"]}),
    "bias-all-conv1d": ("gpt2", {"bias": "all", "fan_in_fan_out": True}),
    "bias-all-phi": ("phi", {"bias": "all"}),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(params=FEATURES)
def feature(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    model_type, lora = FEATURES[request.param]
    return model_type, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}


def make_base(folder: Path, model_type: str, dtype: torch.dtype) -> Path:
    name, _, tied = model_type.partition("-")
    return save_base(folder, name, "causal-lm", dtype, tie_word_embeddings=bool(tied) or name == "gpt2")


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_peft_writes_pefts_bits(tmp_path: Path, feature: tuple[str, dict[str, Any]], dtype: str) -> None:
    model_type, lora = feature
    base = make_base(tmp_path / "base", model_type, DTYPES[dtype])
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []
    tied = "tie_word_embeddings"
    assert config_of(tmp_path / "ours")[tied] == config_of(tmp_path / "peft")[tied]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_other_precisions_stay_within_an_ulp(
    tmp_path: Path, feature: tuple[str, dict[str, Any]], precision: str
) -> None:
    model_type, lora = feature
    base = make_base(tmp_path / "base", model_type, torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", precision))
    assert layout(ours) == layout(theirs)
    for name, tensor in theirs.items():
        if "embed" in name and "embed_tokens" in lora["target_modules"]:
            # PEFT rounds the delta of an embedding before it adds it, so its own error is that of the larger summand
            largest = float(tensor.abs().max())
            assert torch.allclose(ours[name].float(), tensor.float(), rtol=2**-7, atol=2**-8 * largest), name
            continue
        apart = (tensor.contiguous().view(torch.int16).int() - ours[name].contiguous().view(torch.int16).int()).abs()
        assert int(apart.max()) <= 1, name
