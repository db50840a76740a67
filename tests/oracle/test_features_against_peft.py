"""DoRA, trained biases, embeddings and tokens against PEFT's own merge: the saved files, name by name and bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from lora_tool import verify
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.report import Severity
from tests.oracle.peft_merge import (
    Table,
    different,
    layout,
    load_model,
    merge_with_ours,
    merge_with_peft,
    save_adapter,
    save_base,
    saved_tensors,
)

# PEFT warns of every adapter on tied embeddings: what becomes of those is the test
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]

FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}),
    "dora-rslora": ("qwen2", {"use_dora": True, "use_rslora": True, "lora_alpha": 7}),
    "dora-conv1d": ("gpt2", {"use_dora": True, "fan_in_fan_out": True}),
    "dora-embedding": ("llama", {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}),
    "dora-embedding-positions": (
        "gpt2",
        {"use_dora": True, "use_rslora": True, "target_modules": ["wpe", "c_fc"], "fan_in_fan_out": True},
    ),
    "pissa": ("llama", {"init_lora_weights": "pissa"}),
    "pissa-conv1d": ("gpt2", {"init_lora_weights": "pissa", "fan_in_fan_out": True, "lora_alpha": 3}),
    "olora": ("qwen2", {"init_lora_weights": "olora", "use_rslora": True}),
    "excluded-by-regex": ("llama", {"exclude_modules": r".*layers\.0.*|.*down_proj"}),
    "one-layer-by-number": ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1}),
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
def test_precision_peft_writes_pefts_bits_and_the_others_stay_within_an_ulp(
    tmp_path: Path, feature: tuple[str, dict[str, Any]], dtype: str
) -> None:
    model_type, lora = feature
    base = make_base(tmp_path / "base", model_type, DTYPES[dtype])
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []
    tied = "tie_word_embeddings"
    assert config_of(tmp_path / "ours")[tied] == config_of(tmp_path / "peft")[tied]
    for precision in ("float32", "float64") if dtype == "bf16" else ():
        if "init_lora_weights" in lora and precision == "float64":
            with pytest.raises(UnsupportedAdapter, match="depend on the machine"):
                merge_with_ours(base, adapter, tmp_path / precision, precision)
        else:
            ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / precision, precision))
            assert layout(ours) == layout(theirs)
            require_within_an_ulp(ours, theirs, lora["target_modules"])


def require_within_an_ulp(ours: Table, theirs: Table, targets: str | list[str]) -> None:
    for name, tensor in theirs.items():
        if {"embed_tokens", "wpe"} & set(targets) & set(name.split(".")):
            # PEFT rounds the delta of an embedding before it adds it, so its own error is that of the larger summand
            largest = float(tensor.abs().max())
            assert torch.allclose(ours[name].float(), tensor.float(), rtol=2**-7, atol=2**-8 * largest), name
            continue
        apart = (tensor.contiguous().view(torch.int16).int() - ours[name].contiguous().view(torch.int16).int()).abs()
        assert int(apart.max()) <= 1, name


BESIDE_EACH_OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "pissa-of-a-rank-beyond-the-matrix": ("llama", {"init_lora_weights": "pissa", "r": 64}),
    "olora-of-a-rank-beyond-the-matrix": ("llama", {"init_lora_weights": "olora", "r": 64, "use_rslora": True}),
    "lora-bias-on-a-trained-bias": ("opt", {"lora_bias": True, "bias": "lora_only"}),
    "lora-bias-on-a-trained-bias-conv1d": ("gpt2", {"lora_bias": True, "bias": "all", "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("name", BESIDE_EACH_OTHER)
def test_features_that_meet_in_one_tensor(name: str, tmp_path: Path) -> None:
    model_type, lora = BESIDE_EACH_OTHER[name]
    base = make_base(tmp_path / "base", model_type, torch.bfloat16)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []
    assert not verify(merge_with_ours(base, adapter, tmp_path / "float32", "float32")).report.at_least(Severity.WARNING)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_lora_bias_on_a_layer_without_bias_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.bfloat16)
    lora = {"r": 4, "lora_bias": True, "target_modules": ["q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    with pytest.raises(UnsupportedAdapter, match=r"`lora_bias` on a layer that has no bias.*PEFT cannot merge it"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft")


def test_a_base_of_mixed_types_keeps_each(tmp_path: Path) -> None:
    """PEFT sees what the files hold where the model is given its tensors as they are."""
    base = make_base(tmp_path / "base", "llama", torch.bfloat16)
    wide = {torch.float32: ("norm", "layers.1.mlp.up_proj"), torch.float16: ("layers.0.self_attn.q_proj",)}
    tensors = saved_tensors(base)
    for dtype, ends in wide.items():
        tensors |= {
            name: (tensor * 1.001).to(dtype)
            for name, tensor in tensors.items()
            if any(name.endswith(f"{end}.weight") for end in ends)
        }
    for path in base.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    model = load_model(base, "causal-lm")
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name].clone()
    lora = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "modules_to_save": ["model.norm"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert len({tensor.dtype for tensor in ours.values()}) == 3
    assert different(ours, theirs) == []


@pytest.mark.parametrize("name", ["dora", "dora-embedding", "embedding-untied", "bias-all", "tokens-tied"])
def test_a_float64_base_gives_pefts_bits(tmp_path: Path, name: str) -> None:
    model_type, lora = FEATURES[name]
    base = make_base(tmp_path / "base", model_type, torch.float64)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", {"target_modules": "all-linear", "r": 4, **lora})
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_float64_base_keeps_its_digits(precision: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.float64)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora, dtype=torch.float32)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", precision))
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-13, atol=1e-15), name
