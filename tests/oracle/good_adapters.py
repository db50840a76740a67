"""Good adapters of every feature PEFT has, made by PEFT itself on tiny models: what no rule may complain about."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from tests.oracle.tiny import tiny_config, tiny_model

QV = ["q_proj", "v_proj"]
_RENAMED_ALL = {f".lora_{part}.weight": f".lora_{part}.default.weight" for part in "AB"}
_OLD_FIELDS = (
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "target_modules",
    "task_type",
)


class Convolutions(torch.nn.Module):  # type: ignore[misc] # torch is not typed here
    """Two convolutions, one of them grouped, and a linear layer: the shapes of LoRA outside transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3)
        self.grouped = torch.nn.Conv2d(8, 8, 3, groups=2)
        self.line = torch.nn.Conv1d(8, 4, 5)
        self.out = torch.nn.Linear(4, 6)


def _classifier(auto: Any, model_type: str) -> PreTrainedModel:
    model: PreTrainedModel = auto.from_config(tiny_config(model_type, "seq-cls"))
    return model


def _vit() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=56, patch_size=14, num_labels=7))


_llama = partial(tiny_model, "llama", "causal-lm")
_tied = partial(tiny_model, "llama", "causal-lm", tie_word_embeddings=True)
_reward = partial(tiny_model, "llama", "seq-cls")
_qwen = partial(tiny_model, "qwen2", "causal-lm")
_mixtral = partial(tiny_model, "mixtral", "causal-lm")


@dataclass(frozen=True, kw_only=True)
class Good:
    """One adapter: its model, what LoraConfig is given, and what is done to the saved folder afterwards."""

    model: Callable[[], torch.nn.Module] = _llama
    config: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = "CAUSAL_LM"
    vocabulary: int | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] | None = None


GOOD: Mapping[str, Good] = {
    "plain": Good(config={"target_modules": QV}),
    "rslora": Good(config={"target_modules": QV, "use_rslora": True, "lora_alpha": 16}),
    "dora": Good(config={"target_modules": QV, "use_dora": True}),
    "dora-embedding": Good(config={"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "lora-bias": Good(model=_qwen, config={"target_modules": QV, "lora_bias": True}),
    "bias-all": Good(model=_qwen, config={"target_modules": QV, "bias": "all"}),
    "bias-lora-only": Good(model=_qwen, config={"target_modules": QV, "bias": "lora_only"}),
    "embedding": Good(config={"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-and-output": Good(config={"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied-output": Good(model=_tied, config={"target_modules": ["lm_head", "q_proj"]}),
    "saved-ends": Good(config={"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved-norms": Good(config={"target_modules": QV, "modules_to_save": ["input_layernorm", "norm"]}),
    "tokens": Good(config={"target_modules": QV, "trainable_token_indices": [3, 5]}),
    "tokens-tied": Good(model=_tied, config={"target_modules": QV, "trainable_token_indices": [3, 5]}),
    "tokens-by-name": Good(
        config={"target_modules": QV, "trainable_token_indices": {"embed_tokens": [1], "lm_head": [1]}}
    ),
    "resized": Good(config={"target_modules": QV}, vocabulary=104),
    "experts": Good(
        model=_mixtral,
        config={
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "one-expert-parameter": Good(
        model=_mixtral,
        config={
            "target_modules": [],
            "target_parameters": ["experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    "matrix-parameters": Good(
        config={"target_modules": [], "target_parameters": ["q_proj.weight", "mlp.up_proj.weight"]}
    ),
    "layers": Good(config={"target_modules": QV, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "layers-without-pattern": Good(config={"target_modules": QV, "layers_to_transform": 0}),
    "excluded": Good(
        config={"target_modules": [*QV, "up_proj"], "exclude_modules": ["up_proj", "layers.0.self_attn.q_proj"]}
    ),
    "excluded-by-regex": Good(config={"target_modules": QV, "exclude_modules": r".*layers\.0.*"}),
    "regex": Good(config={"target_modules": r".*\.(q|v)_proj"}),
    "all-linear": Good(config={"target_modules": "all-linear"}),
    "rank-patterns": Good(
        config={
            "target_modules": [*QV, "down_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, r".*\.down_proj": 3},
            "alpha_pattern": {"^model.layers.1.self_attn.v_proj": 32, "q_proj": 4},
        }
    ),
    "pissa": Good(config={"target_modules": QV, "init_lora_weights": "pissa"}),
    "olora": Good(config={"target_modules": QV, "init_lora_weights": "olora"}),
    "orthogonal": Good(config={"target_modules": QV, "init_lora_weights": "orthogonal"}),
    "gpt2": Good(
        model=partial(tiny_model, "gpt2", "causal-lm"),
        config={"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
    "convolutions": Good(model=Convolutions, config={"target_modules": ["stem", "grouped", "line", "out"]}, task=None),
    "convolutions-dora": Good(
        model=Convolutions, config={"target_modules": ["stem", "out"], "use_dora": True}, task=None
    ),
    "adapter-name": Good(config={"target_modules": QV}, rename=_RENAMED_ALL),
    "old-peft": Good(config={"target_modules": QV}, fields=_OLD_FIELDS),
    "reward": Good(model=_reward, config={"target_modules": QV}, task="SEQ_CLS"),
    "reward-all-linear": Good(model=_reward, config={"target_modules": "all-linear"}, task="SEQ_CLS"),
    "reward-dora": Good(model=_reward, config={"target_modules": QV, "use_dora": True}, task="SEQ_CLS"),
    "bert": Good(
        model=partial(tiny_model, "bert", "seq-cls"), config={"target_modules": ["query", "value"]}, task="SEQ_CLS"
    ),
    "roberta": Good(
        model=partial(tiny_model, "roberta", "seq-cls"), config={"target_modules": ["query"]}, task="SEQ_CLS"
    ),
    "distilbert": Good(
        model=partial(tiny_model, "distilbert", "seq-cls"),
        config={"target_modules": ["q_lin"], "modules_to_save": ["pre_classifier"]},
        task="SEQ_CLS",
    ),
    "bart": Good(
        model=partial(tiny_model, "bart", "seq-cls"),
        config={"target_modules": QV, "modules_to_save": ["classification_head"]},
        task="SEQ_CLS",
    ),
    "tokens-classified": Good(
        model=partial(_classifier, AutoModelForTokenClassification, "bert"),
        config={"target_modules": ["query"]},
        task="TOKEN_CLS",
    ),
    "questions": Good(
        model=partial(_classifier, AutoModelForQuestionAnswering, "bert"),
        config={"target_modules": ["query"]},
        task="QUESTION_ANS",
    ),
    "translation": Good(
        model=partial(_classifier, AutoModelForSeq2SeqLM, "t5"),
        config={"target_modules": ["q", "v"]},
        task="SEQ_2_SEQ_LM",
    ),
    "images": Good(
        model=_vit, config={"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}, task=None
    ),
}
"""Name → how it is made. Each is what `save_pretrained` writes, trained a little, so that no delta is zero."""


def make(name: str, root: Path) -> tuple[Path, Path | None]:
    """Write the good adapter `name`; return its folder and its base's, None where transformers has no such model."""
    good = GOOD[name]
    torch.manual_seed(0)
    model = good.model()
    base = root / "base" if isinstance(model, PreTrainedModel) else None
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(root / "base")
        model.config._name_or_path = str(root / "base")
        model.name_or_path = str(root / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if good.vocabulary is not None:
            model.resize_token_embeddings(good.vocabulary)
        arguments = {"r": 4, "lora_alpha": 8, **good.config}
        peft_model = get_peft_model(model, LoraConfig(task_type=good.task, **arguments))
        _train(peft_model)
        peft_model.save_pretrained(str(root / "adapter"))
    _edit(root / "adapter", good)
    return root / "adapter", base


def _train(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)


def _edit(folder: Path, good: Good) -> None:
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for old, new in good.rename.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    if good.rename:
        save_file(tensors, weights, metadata={"format": "pt"})
    config = folder / "adapter_config.json"
    raw = json.loads(config.read_text())
    if good.fields is not None:
        config.write_text(json.dumps({key: raw[key] for key in good.fields}))
