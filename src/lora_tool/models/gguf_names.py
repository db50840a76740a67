"""What llama.cpp calls the modules of each model type in its files, for those whose conversion is tested.

The rows of q and k of the Llama family are those of llama.cpp's rotary embedding: of each head, the rows of both halves in
pairs (`conversion/llama.py`, `LlamaModel.permute`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from msgspec import Struct, field

GGUF_WEIGHTS = "adapter.gguf"
ALPHA = "adapter.lora.alpha"
_IN_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)")
_STACK = re.compile(r"ffn_(gate|up|down)_exps")


class GgufNames(Struct, frozen=True, kw_only=True):
    """What llama.cpp calls the modules of a model type."""

    architecture: str
    layers: str = "model.layers"
    in_layer: Mapping[str, str]
    """Path inside of a layer → name after the layer's."""
    ends: Mapping[str, str] = field(default_factory=lambda: {"model.embed_tokens": "token_embd", "lm_head": "output"})
    in_pairs: Mapping[str, str] = field(default_factory=dict)
    """Path of a module whose rows are turned into pairs → the config's field with the number of its heads."""


_SPLIT = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
_MLP = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_EXPERTS = {"mlp.gate": "ffn_gate_inp"}
_PAIRS = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
_LLAMA = GgufNames(architecture="llama", in_layer=_SPLIT | _MLP, in_pairs=_PAIRS)


def _plain(architecture: str) -> GgufNames:
    return GgufNames(architecture=architecture, in_layer=_SPLIT | _MLP)


NAMES: Mapping[str, GgufNames] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": GgufNames(
        architecture="llama", in_layer=_SPLIT | _EXPERTS | {"block_sparse_moe.gate": "ffn_gate_inp"}, in_pairs=_PAIRS
    ),
    "qwen2": _plain("qwen2"),
    "qwen3": _plain("qwen3"),
    "qwen3_moe": GgufNames(architecture="qwen3moe", in_layer=_SPLIT | _MLP | _EXPERTS),
    "gemma": _plain("gemma"),
    "gemma2": _plain("gemma2"),
    "gemma3_text": _plain("gemma3"),
    "phi3": GgufNames(
        architecture="phi3",
        in_layer={
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
    ),
    "gpt2": GgufNames(
        architecture="gpt2",
        layers="transformer.h",
        in_layer={
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        ends={"transformer.wte": "token_embd", "lm_head": "output"},
    ),
}
"""Model type → its names, as `convert_hf_to_gguf.py` of llama.cpp's autumn of 2026 gives them."""
_OF_EXPERTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "llama": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3moe": ("mlp.experts", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
}
"""Architecture → where checkpoints have its experts, and what they call their matrices."""


def module_names(architecture: str) -> Callable[[str], str]:
    """Return what gives a module of llama.cpp's file its path in transformers' model; one that is not known keeps its name.

    Of a stack of experts it is that of one expert, whose number is a `*`.
    """
    rows = [row for row in NAMES.values() if row.architecture == architecture]
    inside = {theirs: (row, ours) for row in reversed(rows) for ours, theirs in reversed([*row.in_layer.items()])}
    ends = {theirs: ours for row in rows for ours, theirs in row.ends.items()}
    experts, matrices = _OF_EXPERTS.get(architecture, ("", {}))

    def path(name: str) -> str:
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            return ends.get(name, name)
        number, own = found.groups()
        stack = _STACK.fullmatch(own)
        if stack and rows and experts:
            return f"{rows[0].layers}.{number}.{experts}.*.{matrices[stack[1]]}"
        if own not in inside:
            return name
        row, module = inside[own]
        return f"{row.layers}.{number}.{module}"

    return path
