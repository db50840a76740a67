"""DoRA and trained biases against PEFT's own merge: the saved files, name by name and bit by bit."""

from __future__ import annotations

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_peft_writes_pefts_bits(tmp_path: Path, feature: tuple[str, dict[str, Any]], dtype: str) -> None:
    model_type, lora = feature
    base = save_base(tmp_path / "base", model_type, "causal-lm", DTYPES[dtype])
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_other_precisions_stay_within_an_ulp(
    tmp_path: Path, feature: tuple[str, dict[str, Any]], precision: str
) -> None:
    model_type, lora = feature
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", precision))
    assert layout(ours) == layout(theirs)
    for name, tensor in theirs.items():
        apart = (tensor.contiguous().view(torch.int16).int() - ours[name].contiguous().view(torch.int16).int()).abs()
        assert int(apart.max()) <= 1, name
