"""Models and adapters of real size, made on the spot: Llama-shaped, random, in the files that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lora_tool.formats.safetensors import build_header
from lora_tool.tensors import DType, TensorSpec

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS = 2048, 5632, 32000, 32, 4
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def make_base(folder: Path, *, layers: int, shards: int = 3) -> None:
    """Write a bf16 Llama: 14 layers are 1.5 GB, 31 layers 3.0 GB."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    specs = list(_base_specs(layers))
    total = sum(spec.nbytes for spec in specs)
    weight_map: dict[str, str] = {}
    groups: list[list[TensorSpec]] = [[] for _ in range(shards)]
    held = 0
    for spec in specs:
        groups[min(held * shards // total, shards - 1)].append(spec)
        held += spec.nbytes
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _write(folder / name, group, spread=0.02)
        weight_map |= {spec.name: name for spec in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_adapter(folder: Path, *, layers: int, rank: int, targets: tuple[str, ...] = tuple(LINEAR)) -> None:
    """Write a float32 CAUSAL_LM adapter with alpha = 2·rank on the targets of every layer, as PEFT saves it."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "../base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [target.rpartition(".")[2] for target in targets],
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    specs = []
    for layer in range(layers):
        for target in targets:
            rows, columns = LINEAR[target]
            stem = f"base_model.model.model.layers.{layer}.{target}"
            specs.append(TensorSpec(name=f"{stem}.lora_A.weight", dtype=DType.F32, shape=(rank, columns)))
            specs.append(TensorSpec(name=f"{stem}.lora_B.weight", dtype=DType.F32, shape=(rows, rank)))
    _write(folder / "adapter_model.safetensors", specs, spread=0.01)


def _base_specs(layers: int) -> Iterator[TensorSpec]:
    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=name, dtype=DType.BF16, shape=shape)

    yield spec("lm_head.weight", VOCAB, HIDDEN)
    yield spec("model.embed_tokens.weight", VOCAB, HIDDEN)
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield spec(f"{stem}.{norm}.weight", HIDDEN)
        for target, shape in LINEAR.items():
            yield spec(f"{stem}.{target}.weight", *shape)
    yield spec("model.norm.weight", HIDDEN)


def _write(path: Path, specs: list[TensorSpec], *, spread: float) -> None:
    random = np.random.default_rng(len(specs))
    # one block of noise, shifted for every tensor: drawing gigabytes of normals takes a minute
    noise = (random.standard_normal(1 << 24, dtype=np.float32) * spread).astype(np.float32)
    with path.open("wb") as file:
        file.write(build_header(specs, {"format": "pt"}))
        for spec in specs:
            values = np.resize(np.roll(noise, int(random.integers(noise.size))), spec.numel)
            stored = (values.view(np.uint32) >> 16).astype(np.uint16) if spec.dtype is DType.BF16 else values
            file.write(stored.tobytes())
