"""Models and adapters of real size, made on the spot: Llama-shaped, random, in the files that transformers writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.safetensors import build_header


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sides of a Llama."""

    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Return the linear layers of a decoder layer: name → rows and columns."""
        hidden, narrow, wide = self.hidden, self.hidden // self.heads * self.kv_heads, self.intermediate
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }


SMALL = Sizes(hidden=2048, intermediate=5632, vocabulary=32000, heads=32, kv_heads=4)
"""14 layers are 1.5 GB of bf16, 31 layers 3.0 GB."""
EIGHT_BILLION = Sizes(hidden=4096, intermediate=14336, vocabulary=128256, heads=32, kv_heads=8)
"""Llama 3's: 32 layers are 16.1 GB."""


def make_base(folder: Path, *, layers: int, shards: int = 3, sizes: Sizes = SMALL) -> None:
    """Write a bf16 Llama."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    specs = list(_base_specs(layers, sizes))
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


def make_adapter(
    folder: Path, *, layers: int, rank: int, targets: tuple[str, ...] | None = None, sizes: Sizes = SMALL
) -> None:
    """Write a float32 CAUSAL_LM adapter with alpha = 2·rank on the targets of every layer, as PEFT saves it.

    Without `targets` these are all linear layers.
    """
    targets = targets or tuple(sizes.linear)
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
            rows, columns = sizes.linear[target]
            stem = f"base_model.model.model.layers.{layer}.{target}"
            specs.append(TensorSpec(name=f"{stem}.lora_A.weight", dtype=DType.F32, shape=(rank, columns)))
            specs.append(TensorSpec(name=f"{stem}.lora_B.weight", dtype=DType.F32, shape=(rows, rank)))
    _write(folder / "adapter_model.safetensors", specs, spread=0.01)


def _base_specs(layers: int, sizes: Sizes) -> Iterator[TensorSpec]:
    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name=name, dtype=DType.BF16, shape=shape)

    yield spec("lm_head.weight", sizes.vocabulary, sizes.hidden)
    yield spec("model.embed_tokens.weight", sizes.vocabulary, sizes.hidden)
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield spec(f"{stem}.{norm}.weight", sizes.hidden)
        for target, shape in sizes.linear.items():
            yield spec(f"{stem}.{target}.weight", *shape)
    yield spec("model.norm.weight", sizes.hidden)


def _write(path: Path, specs: list[TensorSpec], *, spread: float) -> None:
    random = np.random.default_rng(len(specs))
    # one block of noise, shifted for every tensor: drawing gigabytes of normals takes a minute
    noise = (random.standard_normal(1 << 24, dtype=np.float32) * spread).astype(np.float32)
    with path.open("wb") as file:
        file.write(build_header(specs, {"format": "pt"}))
        for spec in specs:
            values = np.roll(noise, int(random.integers(noise.size)))
            for at in range(0, spec.numel, noise.size):
                some = values[: spec.numel - at]
                stored = (some.view(np.uint32) >> 16).astype(np.uint16) if spec.dtype is DType.BF16 else some
                file.write(stored.tobytes())
