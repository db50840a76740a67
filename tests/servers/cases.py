"""Tiny bases that servers can load, the adapters that they are asked to serve, and what PEFT computes with both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from lora_tool import convert
from tests.oracle.adapter_cases import FEATURES, QV, Case, case, config_with
from tests.oracle.peft_merge import FP32, load_model, save_base

PROMPTS = [[5, 17, 3, 42, 8], [1, 2, 3], [0, 4, 5, 6, 1]]
"""They have the tokens that `FEATURES` train."""
FORCED = 40
"""The token that `run_llama_cpp.py` forces, so that it is an ASCII character."""
SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM has no kernel for less
    "vocab_size": 304,
    "max_position_embeddings": 128,
}
_OF_EXPERTS = {
    "mlp.up_proj": "self_attn.k_proj",
    r"mlp\.down_proj": r"self_attn\.k_proj",
    "gate_proj": "k_proj",
    "up_proj": "k_proj",
    "down_proj": "o_proj",
}
_OF_GPT2 = {
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    r"model\.layers\.": r"transformer\.h\.",
    r"layers\.": r"h\.",
    "layers": "h",
    "input_layernorm": "ln_1",
    "norm": "ln_f",
    r"mlp\.down_proj": r"mlp\.c_proj",
    "down_proj": "mlp.c_proj",
    "up_proj": "c_fc",
    "o_proj": "attn.c_proj",
    "[qv]_proj": "c_attn",
    "(q|o)_proj": "c_attn",
    "q_proj": "c_attn",
    "k_proj": "c_attn",
    "v_proj": "c_attn",
    "self_attn": "attn",
    "embed_tokens": "wte",
}
_OF_PHI3 = dict.fromkeys(("[qv]_proj", "q_proj", "k_proj", "v_proj"), "qkv_proj") | {"up_proj": "gate_up_proj"}


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model that the adapters are for."""

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    """What modules are called that Llama has under other names."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """What every adapter of it has besides."""
    experts: bool = False

    def write(self, folder: Path) -> Path:
        return save_base(folder, self.model, "causal-lm", FP32, **{**SIZES, **self.config})

    def kinds(self) -> Iterator[tuple[str, Case]]:
        """Yield the adapters for it by name."""
        usual = {name: replace(each, lora=self._renamed(dict(each.lora))) for name, each in KINDS.items()}
        for name, each in {**usual, **(EXPERTS if self.experts else {})}.items():
            yield name, replace(each, model=self.model, dtype=FP32, lora={**each.lora, **self.lora})

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, str):
            names = "|".join(map(re.escape, sorted(self.words, key=len, reverse=True)))
            return re.sub(names, lambda found: self.words[found[0]], value) if names else value
        if isinstance(value, list):
            return list(dict.fromkeys(map(self._renamed, value))) if all(isinstance(v, str) for v in value) else value
        if isinstance(value, dict):
            return {(key if key in _FIELDS else self._renamed(key)): self._renamed(each) for key, each in value.items()}
        return value


BASES: Mapping[str, Base] = {
    "llama": Base(model="llama", config={"tie_word_embeddings": False}),
    "qwen2": Base(model="qwen2", config={"tie_word_embeddings": False}),
    "qwen2-tied": Base(model="qwen2", config={"tie_word_embeddings": True}),
    "qwen3": Base(model="qwen3", config={"tie_word_embeddings": False}),
    "gemma3": Base(model="gemma3_text", config={"query_pre_attn_scalar": 32}),
    "phi3": Base(model="phi3", words=_OF_PHI3),
    # llama.cpp always normalises the weights of the chosen experts, as the published configs say
    "qwen3-moe": Base(model="qwen3_moe", config={"norm_topk_prob": True}, words=_OF_EXPERTS, experts=True),
    "mixtral": Base(model="mixtral", words=_OF_EXPERTS, experts=True),
    "gpt2": Base(
        model="gpt2", config={"n_embd": 128, "n_head": 4, "n_ctx": 128}, words=_OF_GPT2, lora={"fan_in_fan_out": True}
    ),
}


def _saved_by_torch(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    torch.save(load_file(path), adapter / "adapter_model.bin")
    path.unlink()


def _without_prefix(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    table = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(path).items()}
    save_file(table, path, metadata={"format": "pt"})


def _one_by_one(adapter: Path) -> None:
    fused = adapter.rename(adapter.with_name("fused"))
    convert(fused, "peft-experts", out=adapter)


KINDS: Mapping[str, Case] = {
    **{name: each for name, each in FEATURES.items() if each.task == "causal-lm" and each.model in ("llama", "qwen2")},
    "rslora-and-patterns": case(
        target_modules=["q_proj", "down_proj"],
        use_rslora=True,
        rank_pattern={"down_proj": 3},
        alpha_pattern={"layers.0.self_attn.q_proj": 5},
    ),
    "rank-3": case(target_modules=QV, r=3),
    "rank-12": case(target_modules=QV, r=12),
    "rank-520": case(target_modules=QV, r=520),
    "ranks-4-and-24": case(target_modules=QV, rank_pattern={"v_proj": 24}),
    "alpha-12.5": case(target_modules=QV, edit=config_with(lora_alpha=12.5)),
    "biases-that-the-model-does-not-have": case(target_modules=["o_proj"], bias="lora_only"),
    "bin": case(target_modules=QV, edit=_saved_by_torch),
    "without-prefix": case(target_modules=QV, edit=_without_prefix),
    "trained-as-a-feature-extractor": case(target_modules=QV, task_type="FEATURE_EXTRACTION"),
}
_STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS: Mapping[str, Case] = {
    "experts": case(target_modules=["q_proj"], target_parameters=_STACKS),
    "experts-rslora": case(target_modules=["q_proj"], target_parameters=_STACKS, use_rslora=True),
    "experts-down-only": case(target_modules=["q_proj"], target_parameters=_STACKS[1:]),
    "experts-gate-and-up-only": case(target_modules=["q_proj"], target_parameters=_STACKS[:1]),
    "experts-one-by-one": case(target_modules=["q_proj"], target_parameters=_STACKS, edit=_one_by_one),
    "experts-down-only-one-by-one": case(target_modules=["q_proj"], target_parameters=_STACKS[1:], edit=_one_by_one),
    "router": case(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]),
}
_FIELDS = frozenset({name for each in {**KINDS, **EXPERTS}.values() for name in each.lora})


def loaded(base: Path, adapter: Path | None) -> PreTrainedModel | PeftModel:
    model = load_model(base, "causal-lm")
    return model if adapter is None else PeftModel.from_pretrained(model, adapter)


def expected_of(case: Case, base: Path, adapter: Path, folder: Path) -> list[list[float]]:
    """Return what PEFT computes with the adapter. It passes over names that are without its prefix."""
    if case.edit is _without_prefix:
        adapter = replace(case, edit=None).trained(base, folder)
    return values_of(loaded(base, adapter))


def values_of(model: torch.nn.Module) -> list[list[float]]:
    """Return the log probability of each token after each prompt."""
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    return [torch.log_softmax(each.double(), 0).tolist() for each in logits]


def farthest(found: list[list[float]], expected: list[list[float]]) -> float:
    """Return the largest distance, up to one constant for each prompt, and without FORCED: llama.cpp gives neither."""
    ours, theirs = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    apart = (ours - theirs)[:, [token for token in range(ours.shape[1]) if token != FORCED]]
    return float((apart - apart.mean(dim=1, keepdim=True)).abs().max())


def norm_of(base: Path, adapter: Path) -> float:
    """Return the norm of all of B, scaled: what a server has in memory if it left nothing out."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        layers: list[Any] = [layer for layer in loaded(base, adapter).modules() if hasattr(layer, "lora_B")]
        pairs = [(layer.scaling["default"], layer.lora_B["default"].weight) for layer in layers]
    else:
        files = adapter / "adapter_model.safetensors"
        table = load_file(files) if files.exists() else torch.load(adapter / "adapter_model.bin")
        scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        pairs = [(scaling, each) for name, each in table.items() if "lora_B" in name or "embedding_B" in name]
    return float(sum(float((scaling * each.double()).square().sum()) for scaling, each in pairs) ** 0.5)


def scores_of(base: Path, adapter: Path, labels: int) -> torch.Tensor:
    """Return the scores that PEFT's classifier gives each prompt."""
    model = PeftModel.from_pretrained(load_model(base, "seq-cls", labels), adapter)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
