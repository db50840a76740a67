"""Sums of LoRA on convolutions and on attention of one module, against PEFT's own ΔW; grouped kernels are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ViTConfig, ViTModel, Wav2Vec2Config, Wav2Vec2Model

from lora_tool import combine, resize, verify
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.plans.algebra.plan_combine import plan_combine
from lora_tool.plans.algebra.plan_prepare import plan_prepare
from tests.oracle.test_combine import EXACT, Deltas, farthest, least, summed

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about tiny configs

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = ViTModel(ViTConfig(**SMALL, image_size=16, patch_size=4))
    return model


def wav2vec2() -> nn.Module:
    torch.manual_seed(0)
    kernels: dict[str, Any] = {"conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3)}
    model: nn.Module = Wav2Vec2Model(
        Wav2Vec2Config(**SMALL, **kernels, num_feat_extract_layers=2, num_conv_pos_embeddings=8)
    )
    return model


class Grouped(nn.Module):
    """A convolution of two groups, and an attention that PEFT adapts as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, groups=2)
        self.attention = nn.MultiheadAttention(8, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "conv2d": (vit, ["projection"]),
    "conv1d": (wav2vec2, ["conv_layers.0.conv", "conv_layers.1.conv", "q_proj"]),
}


def trained(model: nn.Module, folder: Path, seed: int, **lora: Any) -> Path:
    adapted: Any = get_peft_model(model, LoraConfig(**lora))
    adapted.save_pretrained(str(folder))
    path, generator = folder / "adapter_model.safetensors", torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tensor.shape, generator=generator) * 0.1 for name, tensor in load_file(path).items()}
    save_file(noise, path, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "the/same"}))
    return folder


def deltas(model: nn.Module, adapter: Path) -> Deltas:
    loaded: Any = PeftModel.from_pretrained(model, adapter).double()
    return {
        name: layer.get_delta_weight("default").detach()
        for name, layer in loaded.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


@pytest.mark.parametrize("name", MODELS)
def test_kernels_add_up_and_lose_rank_as_matrices_do(name: str, tmp_path: Path) -> None:
    model, targets = MODELS[name]
    one = trained(model(), tmp_path / "one", 0, r=3, lora_alpha=5, target_modules=targets)
    other = trained(model(), tmp_path / "other", 1, r=6, lora_alpha=6, use_rslora=True, target_modules=targets)
    expected = summed([(1.0, deltas(model(), one)), (-0.5, deltas(model(), other))])
    for keep in (None, 1.0):
        out = combine([one, other], weights=[1, -0.5], keep=keep, out=tmp_path / f"keep-{keep}").path
        assert farthest(deltas(model(), out), expected) <= EXACT
        assert not verify(out).report.findings
    lower = combine([one, other], weights=[1, -0.5], rank=2, out=tmp_path / "lower").path
    for module, found in deltas(model(), lower).items():
        size = float(expected[module].norm())
        best = least(expected[module].reshape(len(expected[module]), -1), 2)
        assert float((found - expected[module]).norm()) <= best * (1 + 1e-6) + EXACT * size
    assert not verify(lower).report.findings
    with pytest.raises(UnsupportedAdapter, match="LoRA on convolutions"):
        plan_prepare(one, "vllm")


def test_kernels_of_groups_are_refused_and_attention_of_one_module_is_not(tmp_path: Path) -> None:
    grouped = trained(Grouped(), tmp_path / "grouped", 0, r=4, target_modules=["conv"])
    with pytest.raises(UnsupportedAdapter, match="grouped convolution"):
        plan_combine([grouped])
    with pytest.raises(UnsupportedAdapter, match="grouped convolution"):
        plan_prepare(grouped, "peft")
    whole = trained(Grouped(), tmp_path / "whole", 1, r=2, target_modules=["attention"])
    out = resize(whole, rank=1, out=tmp_path / "out").path
    assert {min(tensor.shape) for tensor in load_file(out / "adapter_model.safetensors").values()} == {1}
    assert not verify(out).report.findings
