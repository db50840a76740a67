"""Mixtures of experts that transformers stacks: on disk each expert has its own matrices, in memory all share two.

All else of these causal LMs is stored as it is in memory, so headers and config.json tell every parameter of the class
and where it lies. A row says which fields decide what; `tests/contract/test_mixtures.py` builds each class of
transformers 5.23 with every field of its config changed and left out, and compares all that a plan asks of it. A config
that leaves a size open, or has a value that a row does not know, is for transformers itself to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.sizes import Sizes

_Shape = tuple[int, ...]
Parameters = Mapping[str, str]
"""Name → the sizes of its dimensions in fields of the config, and after `if` the switch that adds it."""

EMBEDDINGS, OUTPUT, EXPERTS, ROUTER = "model.embed_tokens", "lm_head", "mlp.experts", "mlp.gate"
LAYERS = "model.layers"
CORRECTION = "e_score_correction_bias"
"""The router's buffer, which transformers keeps in float32 in a model of 16 bits."""
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensor of all experts in memory → the matrices of each expert whose rows it holds, expert by expert."""
_MOST_LAYERS = 4096


class Mixture(Struct, frozen=True, kw_only=True):
    """The causal LM of a model type, or what it is under some values of the config's fields."""

    model_type: str
    causal_lm: str
    attention: Parameters
    """Of every layer, in the model's order."""
    sparse: Parameters
    """Of a router and its experts, in the same order."""
    norms: Parameters = MappingProxyType(
        {"input_layernorm.weight": "hidden_size", "post_attention_layernorm.weight": "hidden_size"}
    )
    """Of every layer, after all else."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Fields that a config may also call otherwise."""
    dense_first: str | None = None
    """The field with the number of layers at the beginning that have no experts."""
    stepped: bool = False
    """Whether `mlp_only_layers` and `decoder_sparse_step` say which layers have no experts."""
    fixed: Mapping[str, bool | None] = field(default_factory=dict)
    """Fields with a value; one that must be false may be left out."""
    switches: Mapping[str, bool] = MappingProxyType({"attention_bias": False})
    """Switches, and what they are in a config that leaves them out."""
    follows: Mapping[str, str] = MappingProxyType({"head_dim": "hidden_size/num_attention_heads"})
    """Sizes that a config may leave out, and what they are then."""

    def shapes(self, config: ModelConfig) -> dict[str, _Shape] | None:
        """Return the parameters and buffers that the config means, in the model's order; None where it may mean others."""
        if any(config.raw.get(name, False) is not value for name, value in self.fixed.items()):
            return None
        sizes = Sizes({"aliases": self.aliases, "follows": self.follows}, config)
        forms = self._forms(config, sizes)
        ends = self._evaluated(_ENDS, config, sizes)
        layers = {form: self._evaluated(self._layer(sparse=form), config, sizes) for form in set(forms or ())}
        if not forms or ends is None or None in layers.values():
            return None
        made = {f"{EMBEDDINGS}.weight": ends[f"{EMBEDDINGS}.weight"]}
        for number, form in enumerate(forms):
            made |= {f"{LAYERS}.{number}.{name}": shape for name, shape in (layers[form] or {}).items()}
        return made | ends

    def _layer(self, *, sparse: bool) -> Parameters:
        return {**self.attention, **(self.sparse if sparse else _mlp("mlp", "intermediate_size")), **self.norms}

    def _forms(self, config: ModelConfig, sizes: Sizes) -> list[bool] | None:
        """Return for each layer whether it has experts; None where the config does not tell."""
        count = sizes.value("num_hidden_layers")
        if count is None or not 0 < count <= _MOST_LAYERS:
            return None
        if self.dense_first is not None:
            first = sizes.value(self.dense_first)
            return None if first is None else [layer >= first for layer in range(count)]
        if not self.stepped:
            return [True] * count
        step, dense = sizes.value("decoder_sparse_step"), config.raw.get("mlp_only_layers") or []
        if not step or not isinstance(dense, list):
            return None
        return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]

    def _evaluated(self, parameters: Parameters, config: ModelConfig, sizes: Sizes) -> dict[str, _Shape] | None:
        """Return the parameters that the config's switches leave, with their shapes; None for one that is not known."""
        made: dict[str, _Shape] = {}
        for name, text in parameters.items():
            dimensions, _, switch = text.partition(" if ")
            is_on = config.raw.get(switch, self.switches[switch]) if switch else True
            shape = tuple(map(sizes.value, dimensions.split()))
            if not isinstance(is_on, bool):
                return None
            if not is_on:
                continue
            known = tuple(size for size in shape if size is not None and size > 0)
            if len(known) < len(shape):
                return None
            made[name] = known
        return made


def mixtures_of(model_type: str) -> Iterator[Mixture]:
    """Yield the rows of a model type: none where transformers does more than to stack the experts."""
    return (row for row in _ROWS if row.model_type == model_type)


_ENDS = {
    f"{EMBEDDINGS}.weight": "vocab_size hidden_size",
    "model.norm.weight": "hidden_size",
    f"{OUTPUT}.weight": "vocab_size hidden_size",
}


def _mlp(path: str, width: str) -> Parameters:
    wide, narrow = f"{width} hidden_size", f"hidden_size {width}"
    return {f"{path}.gate_proj.weight": wide, f"{path}.up_proj.weight": wide, f"{path}.down_proj.weight": narrow}


def _stacks(experts: str, width: str) -> Parameters:
    return {
        f"{EXPERTS}.gate_up_proj": f"{experts} 2*{width} hidden_size",
        f"{EXPERTS}.down_proj": f"{experts} hidden_size {width}",
    }


def _router(experts: str, *, corrected: bool = False) -> Parameters:
    correction = {f"{ROUTER}.{CORRECTION}": experts} if corrected else {}
    return {f"{ROUTER}.weight": f"{experts} hidden_size"} | correction


def _grouped(bias: str, norms: Mapping[str, str] | None = None, *, biased_output: bool = True) -> Parameters:
    """Return attention with fewer heads for keys and values, `bias` the switch of its biases."""
    rows = {"q_proj": "num_attention_heads*head_dim"}
    rows |= dict.fromkeys(("k_proj", "v_proj"), "num_key_value_heads*head_dim")
    made: dict[str, str] = {}
    for name, size in rows.items():
        made |= {f"self_attn.{name}.weight": f"{size} hidden_size", f"self_attn.{name}.bias": f"{size} if {bias}"}
    made["self_attn.o_proj.weight"] = "hidden_size num_attention_heads*head_dim"
    made |= {"self_attn.o_proj.bias": f"hidden_size if {bias}"} if biased_output else {}
    return made | {f"self_attn.{name}.weight": size for name, size in (norms or {}).items()}


def _latent(*, direct: bool = False) -> Parameters:
    """Return DeepSeek's attention, whose queries come `direct` or over a matrix of rank `q_lora_rank`."""
    heads = "num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim"
    queries = {
        "q_a_proj.weight": "q_lora_rank hidden_size",
        "q_a_proj.bias": "q_lora_rank if attention_bias",
        "q_a_layernorm.weight": "q_lora_rank",
        "q_b_proj.weight": f"{heads} q_lora_rank",
    }
    made = {"q_proj.weight": f"{heads} hidden_size"} if direct else queries
    made |= {
        "kv_a_proj_with_mqa.weight": "kv_lora_rank+qk_rope_head_dim hidden_size",
        "kv_a_proj_with_mqa.bias": "kv_lora_rank+qk_rope_head_dim if attention_bias",
        "kv_a_layernorm.weight": "kv_lora_rank",
        "kv_b_proj.weight": "num_attention_heads*qk_nope_head_dim+num_attention_heads*v_head_dim kv_lora_rank",
        "o_proj.weight": "hidden_size num_attention_heads*v_head_dim",
        "o_proj.bias": "hidden_size if attention_bias",
    }
    return {f"self_attn.{name}": size for name, size in made.items()}


def _routed(*, corrected: bool) -> Parameters:
    """Return the experts of DeepSeek's kin, with some beside them that see every token."""
    width = "moe_intermediate_size"
    stacks, router = _stacks("n_routed_experts", width), _router("n_routed_experts", corrected=corrected)
    return {**stacks, **router, **_mlp("mlp.shared_experts", f"{width}*n_shared_experts")}


def _deepseek_rows() -> Iterator[Mixture]:
    for number, corrected in ((2, False), (3, True)):
        row = Mixture(
            model_type=f"deepseek_v{number}",
            causal_lm=f"DeepseekV{number}ForCausalLM",
            attention=_latent(),
            sparse=_routed(corrected=corrected),
            dense_first="first_k_dense_replace",
            aliases={"n_routed_experts": "num_local_experts" if corrected else "num_experts"},
            fixed={} if corrected else {"mlp_bias": False},
        )
        yield row
        yield replace(row, attention=_latent(direct=True), fixed={**row.fixed, "q_lora_rank": None})


_HEAD_NORMS = {"q_norm": "head_dim", "k_norm": "head_dim"}
_WIDE_NORMS = {"q_norm": "num_attention_heads*head_dim", "k_norm": "num_key_value_heads*head_dim"}
_LOCAL = {"num_experts": "num_local_experts"}
_ROWS = (
    *_deepseek_rows(),
    Mixture(
        model_type="dots1",
        causal_lm="Dots1ForCausalLM",
        attention=_grouped("attention_bias", _HEAD_NORMS),
        sparse=_routed(corrected=True),
        dense_first="first_k_dense_replace",
        aliases={"n_routed_experts": "num_local_experts"},
    ),
    Mixture(
        model_type="flex_olmo",
        causal_lm="FlexOlmoForCausalLM",
        attention=_grouped("attention_bias", _WIDE_NORMS),
        sparse={**_router("num_experts"), **_stacks("num_experts", "intermediate_size")},
        norms={"post_attention_layernorm.weight": "hidden_size", "post_feedforward_layernorm.weight": "hidden_size"},
        aliases=_LOCAL,
    ),
    Mixture(
        model_type="glm4_moe",
        causal_lm="Glm4MoeForCausalLM",
        attention=_grouped(
            "attention_bias",
            {name: f"{size} if use_qk_norm" for name, size in _HEAD_NORMS.items()},
            biased_output=False,
        ),
        sparse=_routed(corrected=True),
        dense_first="first_k_dense_replace",
        aliases={"n_routed_experts": "num_local_experts"},
        switches={"attention_bias": False, "use_qk_norm": False},
    ),
    Mixture(
        model_type="olmoe",
        causal_lm="OlmoeForCausalLM",
        attention=_grouped("attention_bias", {"q_norm": "hidden_size", "k_norm": _WIDE_NORMS["k_norm"]}),
        sparse={**_router("num_experts"), **_stacks("num_experts", "intermediate_size")},
        aliases=_LOCAL,
    ),
    Mixture(
        model_type="qwen2_moe",
        causal_lm="Qwen2MoeForCausalLM",
        attention=_grouped("qkv_bias", biased_output=False),
        sparse={
            **_router("num_experts"),
            **_stacks("num_experts", "moe_intermediate_size"),
            **_mlp("mlp.shared_expert", "shared_expert_intermediate_size"),
            "mlp.shared_expert_gate.weight": "1 hidden_size",
        },
        stepped=True,
        switches={"qkv_bias": True},
    ),
    Mixture(
        model_type="qwen3_moe",
        causal_lm="Qwen3MoeForCausalLM",
        attention=_grouped("attention_bias", _HEAD_NORMS),
        sparse={**_stacks("num_experts", "moe_intermediate_size"), **_router("num_experts")},
        stepped=True,
        aliases=_LOCAL,
    ),
)
