"""Weights of other programs are refused by their names, with a way out; what is only beside ours disturbs nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from lora_tool.checkpoints import AdapterDir, open_checkpoint, require_whole
from lora_tool.core.errors import CorruptFile, UnsupportedCheckpoint
from tests.checkpoint_edits import raw, write
from tests.mutations import FIXTURES

MODEL_CONFIG = {"config.json": {"model_type": "llama"}}
PEFT_CONFIG = {"adapter_config.json": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}}
MLX_CONFIG = {"adapter_config.json": {"fine_tune_type": "lora", "lora_parameters": {"rank": 8}, "num_layers": 16}}


@pytest.mark.parametrize(
    ("configs", "name", "words"),
    [
        (MLX_CONFIG, "adapters.safetensors", "MLX-LM"),
        (MLX_CONFIG, "0000100_adapters.safetensors", "MLX-LM"),
        ({}, "adapters.npz", "MLX-LM"),
        ({}, "pytorch_lora_weights.safetensors", "diffusers"),
        (PEFT_CONFIG, "pytorch_lora_weights.bin", "diffusers"),
        (PEFT_CONFIG, "adapter_model.pt", "torchtune"),
        ({}, "adapter_0.pt", "torchtune"),
        ({}, "lit_model.pth.lora", "LitGPT"),
        ({}, "epoch=1-step=20.ckpt", "Lightning"),
        (PEFT_CONFIG, "adapter-f16.gguf", "GGUF"),
        (MODEL_CONFIG, "Model-Q4_K_M.gguf", "GGUF"),
        (MODEL_CONFIG, "model.fp16.safetensors", "variant"),
        (MODEL_CONFIG, "pytorch_model.fp16-00001-of-00002.bin", "variant"),
        (MODEL_CONFIG, "consolidated.00.pth", "original format"),
        (MODEL_CONFIG, "tf_model.h5", "TensorFlow"),
        (MODEL_CONFIG, "flax_model-00001-of-00002.msgpack", "Flax"),
        ({}, "latest_checkpointed_iteration.txt", "Megatron"),
        ({}, "model.nemo", "NeMo"),
    ],
)
def test_a_file_of_another_program_is_named(
    configs: Mapping[str, object], name: str, words: str, tmp_path: Path
) -> None:
    for config, content in configs.items():
        (tmp_path / config).write_text(json.dumps(content))
    (tmp_path / name).write_bytes(b"\0" * 64)
    with pytest.raises(UnsupportedCheckpoint, match=words) as refused:
        open_checkpoint(tmp_path)
    assert name in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "config", "tensors", "words"),
    [
        ("config.json", {"type": "act", "input_features": {}, "n_obs_steps": 1}, ["model.encoder.weight"], "LeRobot"),
        (
            "adapter_config.json",
            {"config": {"r": 8}, "model_class": "BertAdapterModel", "model_type": "bert"},
            [],
            "AdapterHub",
        ),
        ("adapter_config.json", {"rank": 8}, ["layers.0.q.A", "layers.0.q.B"], "no `peft_type`, and no tensor"),
    ],
)
def test_a_config_of_another_program_is_one_line(
    name: str, config: object, tensors: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(config))
    if tensors:
        weights = "model.safetensors" if name == "config.json" else "adapter_model.safetensors"
        write(tmp_path / weights, {tensor: raw(4, 4) for tensor in tensors})
    with pytest.raises(UnsupportedCheckpoint, match=words) as refused:
        open_checkpoint(tmp_path)
    assert name in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", "kohya"),
        ("model.layers.0.self_attn.q_proj.kernel_lora_a", "Tunix"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", "kohya"),
        ("unet.down_blocks.0.attn.to_q.lora_A.weight", "diffusers"),
        ("transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight", "diffusers"),
        ("model.layers.0.self_attn.q_proj.lora_a", "MLX-LM"),
        ("layers.0.attn.q_proj.lora_b.weight", "torchtune"),
    ],
)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "my_lora.safetensors"])
def test_names_of_another_program_are_named(name: str, tensor: str, words: str, tmp_path: Path) -> None:
    if name.startswith("adapter"):
        (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT_CONFIG["adapter_config.json"]))
    write(tmp_path / name, {tensor: raw(4, 16)})
    with pytest.raises(UnsupportedCheckpoint, match=words):
        open_checkpoint(tmp_path)


def test_beside_an_adapter_or_a_model_they_disturb_nothing(tmp_path: Path) -> None:
    for kind in ("adapter", "base"):
        folder = tmp_path / kind
        shutil.copytree(FIXTURES / "reward-qwen2" / kind, folder)
        for name in ("adapters.safetensors", "adapter_0.pt", "model.fp16.safetensors", "consolidated.safetensors"):
            (folder / name).write_bytes(b"\0" * 64)
        (folder / "original").mkdir()
        opened = open_checkpoint(folder)
        require_whole(opened)
        assert isinstance(opened, AdapterDir) is (kind == "adapter")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "pointer that git leaves"),
        ("<!DOCTYPE html><html></html>", "a web page"),
        ("<html>\n<head><title>404 Not Found", "a web page"),
    ],
)
def test_what_a_download_left_instead_is_named(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT_CONFIG["adapter_config.json"]))
    (tmp_path / name).write_text(content)
    with pytest.raises(CorruptFile, match=words):
        require_whole(open_checkpoint(tmp_path))
