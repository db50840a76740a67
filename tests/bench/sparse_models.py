"""Models of hundreds of billions of parameters and adapters of them, from headers alone: every file is sparse.

No weight is on the disk, and none is read; names, shapes, types and the number of files are those of the published
checkpoints.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANK = 16
TILE = 128
"""Rows and columns of the weights that share a scale in fp8."""
_WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1}

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, str, Shape]]
"""Names, types and shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of experts: the first `dense` of its `layers` have one feed-forward block instead, of width `wide`."""

    config: str
    """transformers' class of its config, whose `fields` are not the defaults."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    layers: int
    dense: int = 0
    experts: int
    shared: bool = False
    hidden: int
    wide: int
    narrow: int
    vocabulary: int
    files: int
    attention: Mapping[str, Shape]
    """The linear layers of the attention."""
    norms: Mapping[str, int]
    """Those inside the attention."""
    biased: bool = False
    """Whether the router corrects its scores."""

    def linear_layers(self) -> Iterator[tuple[str, Shape]]:
        """Yield the linear layers that LoRA is put on, and their shapes."""
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield from ((f"{prefix}.self_attn.{name}", shape) for name, shape in self.attention.items())
            if layer < self.dense:
                yield from ((f"{prefix}.mlp.{name}", shape) for name, shape in self._block(self.wide))
                continue
            if self.shared:
                yield from ((f"{prefix}.mlp.shared_experts.{name}", shape) for name, shape in self._block(self.narrow))
            for expert in range(self.experts):
                yield from (
                    (f"{prefix}.mlp.experts.{expert}.{name}", shape) for name, shape in self._block(self.narrow)
                )

    def _block(self, width: int) -> Iterator[tuple[str, Shape]]:
        yield from (("gate_proj", (width, self.hidden)), ("up_proj", (width, self.hidden)))
        yield "down_proj", (self.hidden, width)

    def tensors(self, *, fp8: bool = False) -> Tensors:
        """Yield the tensors of its checkpoint; in `fp8` each linear layer has a scale for each tile."""
        yield "model.embed_tokens.weight", "BF16", (self.vocabulary, self.hidden)
        for name, (rows, columns) in self.linear_layers():
            yield f"{name}.weight", "F8_E4M3" if fp8 else "BF16", (rows, columns)
            if fp8:
                yield f"{name}.weight_scale_inv", "F32", (-(-rows // TILE), -(-columns // TILE))
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield from ((f"{prefix}.self_attn.{name}.weight", "BF16", (n,)) for name, n in self.norms.items())
            yield f"{prefix}.input_layernorm.weight", "BF16", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", "BF16", (self.hidden,)
            if layer >= self.dense:
                yield f"{prefix}.mlp.gate.weight", "BF16", (self.experts, self.hidden)
                if self.biased:
                    yield f"{prefix}.mlp.gate.e_score_correction_bias", "F32" if fp8 else "BF16", (self.experts,)
        yield "model.norm.weight", "BF16", (self.hidden,)
        yield "lm_head.weight", "BF16", (self.vocabulary, self.hidden)


DEEPSEEK_V3 = Mixture(
    config="DeepseekV3Config",
    layers=61,
    dense=3,
    experts=256,
    shared=True,
    hidden=7168,
    wide=18432,
    narrow=2048,
    vocabulary=129280,
    files=163,
    attention={
        "q_a_proj": (1536, 7168),
        "q_b_proj": (128 * (128 + 64), 1536),
        "kv_a_proj_with_mqa": (512 + 64, 7168),
        "kv_b_proj": (128 * (128 + 128), 512),
        "o_proj": (7168, 128 * 128),
    },
    norms={"q_a_layernorm": 1536, "kv_a_layernorm": 512},
    biased=True,
)
"""671 B."""
QWEN3_235B = Mixture(
    config="Qwen3MoeConfig",
    fields={
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "vocab_size": 151936,
        "mlp_only_layers": [],
    },
    layers=94,
    experts=128,
    hidden=4096,
    wide=12288,
    narrow=1536,
    vocabulary=151936,
    files=118,
    attention={"q_proj": (8192, 4096), "k_proj": (512, 4096), "v_proj": (512, 4096), "o_proj": (4096, 8192)},
    norms={"q_norm": 128, "k_norm": 128},
)
"""Qwen3-235B-A22B."""


def make_base(root: Path, model: Mixture, *, fp8: bool = False) -> int:
    """Write the model in bfloat16, or its linear layers in `fp8`; return how many tensors it has."""
    import transformers

    root.mkdir()
    made = getattr(transformers, model.config)(dtype="bfloat16", **model.fields)
    made.architectures = [f"{model.config.removesuffix('Config')}ForCausalLM"]
    if fp8:
        made.quantization_config = {"quant_method": "fp8", "weight_block_size": [TILE, TILE], "fmt": "e4m3"}
    made.save_pretrained(root)
    listed = list(model.tensors(fp8=fp8))
    per_file = -(-len(listed) // model.files)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(model.files):
        name = f"model-{number + 1:05}-of-{model.files:05}.safetensors"
        held = listed[number * per_file : (number + 1) * per_file]
        total += _write_sparse(root / name, held)
        weight_map |= {tensor: name for tensor, _, _ in held}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(listed)


def make_adapter(root: Path, model: Mixture, *, only: str = "") -> None:
    """Write an adapter on all linear layers of the model, or on those with `only` in their names."""
    root.mkdir()
    layers = [(name, shape) for name, shape in model.linear_layers() if only in name]
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    names = sorted({name.rpartition(".")[2] for name, _ in layers})
    (root / "adapter_config.json").write_text(json.dumps({**fields, "target_modules": names}))
    _write_sparse(
        root / "adapter_model.safetensors",
        [
            (f"base_model.model.{name}.{factor}.weight", "BF16", shape)
            for name, (rows, columns) in layers
            for factor, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK)))
        ],
    )


def _write_sparse(path: Path, held: list[tuple[str, str, Shape]]) -> int:
    header, at = {}, 0
    for name, dtype, shape in held:
        nbytes = _WIDTHS[dtype]
        for side in shape:
            nbytes *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at
