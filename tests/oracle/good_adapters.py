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
from peft.tuners.lora.config import BdLoraConfig, KasaConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
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


class Convolutions(torch.nn.Module):
    """Two convolutions, one of them grouped, and a linear layer: the shapes of LoRA outside transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3)
        self.grouped = torch.nn.Conv2d(8, 8, 3, groups=2)
        self.line = torch.nn.Conv1d(8, 4, 5)
        self.out = torch.nn.Linear(4, 6)


class Attention(torch.nn.Module):
    """An attention module of torch's own, whose projections are one packed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2)
        self.out = torch.nn.Linear(16, 6)


def _headless() -> PreTrainedModel:
    model: PreTrainedModel = AutoModel.from_config(tiny_config("llama", "causal-lm"))
    return model


def _whisper() -> PreTrainedModel:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 64, "max_source_positions": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **ends, max_target_positions=16))


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
    """The config's fields that are kept, all of them where this is None."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Fields that another version or an init with data of its own would have written."""
    dtype: torch.dtype = torch.float32
    sixteen_bit: bool = False
    """The adapter is trained and saved in 16 bits, too."""
    adapter_name: str = "default"


def _good(targets: list[str] | str = QV, **told: Any) -> Good:
    """Return an adapter on these modules: what is `told` are fields of it, and else what LoraConfig is given."""
    own = {name: told.pop(name) for name in Good.__dataclass_fields__ if name in told}
    return Good(config={"target_modules": targets, **told}, **own)


GOOD: Mapping[str, Good] = {
    "plain": _good(),
    "rslora": _good(use_rslora=True, lora_alpha=16),
    "dora": _good(use_dora=True),
    "dora-embedding": _good(["embed_tokens", "q_proj"], use_dora=True),
    "lora-bias": _good(model=_qwen, lora_bias=True),
    "bias-all": _good(model=_qwen, bias="all"),
    "bias-lora-only": _good(model=_qwen, bias="lora_only"),
    "embedding-and-output": _good(["embed_tokens", "lm_head", "q_proj"]),
    "tied-output": _good(["lm_head", "q_proj"], model=_tied),
    "saved-ends": _good(modules_to_save=["embed_tokens", "lm_head"]),
    "saved-norms": _good(modules_to_save=["input_layernorm", "norm"]),
    "tokens": _good(trainable_token_indices=[3, 5]),
    "tokens-tied": _good(model=_tied, trainable_token_indices=[3, 5]),
    "tokens-by-name": _good(trainable_token_indices={"embed_tokens": [1], "lm_head": [1]}),
    "experts": _good(
        ["q_proj"], model=_mixtral, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
    "one-expert-parameter": _good(
        [], model=_mixtral, target_parameters=["experts.down_proj"], rank_pattern={"experts.down_proj": 2}
    ),
    "matrix-parameters": _good([], target_parameters=["q_proj.weight", "mlp.up_proj.weight"]),
    "matrix-parameters-olora": _good([], target_parameters=["q_proj.weight"], init_lora_weights="olora", r=64),
    "layers": _good(layers_to_transform=[1], layers_pattern="layers"),
    "layers-without-pattern": _good([*QV, "embed_tokens"], layers_to_transform=0),
    "excluded": _good([*QV, "up_proj"], exclude_modules=["up_proj", "layers.0.self_attn.q_proj"]),
    "excluded-by-regex": _good(exclude_modules=r".*layers\.0.*"),
    "regex": _good(r".*\.(q|v)_proj"),
    "rank-patterns": _good(
        [*QV, "down_proj"],
        rank_pattern={"layers.0.self_attn.q_proj": 2, r".*\.down_proj": 3},
        alpha_pattern={"^model.layers.1.self_attn.v_proj": 32, "q_proj": 4},
    ),
    "pissa": _good(init_lora_weights="pissa"),
    "olora": _good(init_lora_weights="olora"),
    "orthogonal": _good(init_lora_weights="orthogonal"),
    "gpt2": _good(["c_attn", "c_fc"], model=partial(tiny_model, "gpt2", "causal-lm"), fan_in_fan_out=True),
    "convolutions": _good(["stem", "grouped", "line", "out"], model=Convolutions, task=None),
    "convolutions-dora": _good(["stem", "out"], model=Convolutions, use_dora=True, task=None),
    "adapter-name": _good(rename=_RENAMED_ALL),
    "named-adapter": _good(adapter_name="policy"),
    "oldest-peft": _good(
        fields=_OLD_FIELDS,
        others={"enable_lora": None, "merge_weights": False, "target_modules": QV, "lora_alpha": 8.0},
    ),
    "newer-peft": _good(others={"lora_magic": {"depth": 3}, "peft_version": "9.0.0"}),
    "random-init": _good(init_lora_weights=False),
    "eva": _good(init_lora_weights="eva"),
    "pissa-niter": _good(init_lora_weights="pissa_niter_4", r=64),
    "corda": _good(others={"init_lora_weights": "corda", "corda_config": {"rho": 0.1}}),
    "lora-ga": _good(others={"init_lora_weights": "lora_ga", "lora_ga_config": {}}),
    "loftq": _good(others={"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}),
    "layer-replication": _good(layer_replication=[[0, 2], [1, 2]]),
    "activated": _good(alora_invocation_tokens=[5, 6]),
    "block-diagonal": _good(use_bdlora=BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False)),
    "kasa": _good(kasa_config=KasaConfig()),
    "tied-saved": _good(model=_tied, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tied-saved-alone": _good(model=_tied, modules_to_save=["lm_head"]),
    "tied-resized": _good(model=_tied, vocabulary=104),
    "resized-and-saved": _good(modules_to_save=["embed_tokens", "lm_head"], vocabulary=104),
    "tokens-and-embedding": _good(["v_proj", "lm_head"], trainable_token_indices=[1, 2]),
    "everything": _good(
        [*QV, "down_proj"],
        model=_qwen,
        use_rslora=True,
        use_dora=True,
        bias="all",
        rank_pattern={"down_proj": 6},
        alpha_pattern={"q_proj": 3},
        modules_to_save=["norm"],
        trainable_token_indices=[4],
        exclude_modules=["layers.1.mlp.down_proj"],
    ),
    "block-saved": _good(["q_proj"], modules_to_save=["mlp"]),
    "saved-by-path": _good(modules_to_save=["model.norm", "layers.0.mlp.up_proj"]),
    "half": _good(dtype=torch.float16),
    "bfloat16": _good([*QV, "embed_tokens"], dtype=torch.bfloat16, sixteen_bit=True),
    "rank-of-the-width": _good(r=32, lora_alpha=0.5),
    "negative-alpha": _good(lora_alpha=-8),
    "attention-of-torch": _good(["attention", "out"], model=Attention, task=None),
    "features": _good(model=_headless, task="FEATURE_EXTRACTION"),
    "mamba": _good(["x_proj", "in_proj", "embeddings"], model=partial(tiny_model, "mamba", "causal-lm")),
    "qwen-reward": _good(
        "all-linear",
        model=partial(tiny_model, "qwen2", "seq-cls"),
        modules_to_save=["score", "embed_tokens"],
        task="SEQ_CLS",
    ),
    "two-layer-head": _good(
        ["key", "dense"], model=partial(tiny_model, "camembert", "seq-cls"), bias="all", task="SEQ_CLS"
    ),
    "head-called-as-anothers": _good(
        ["summary", "layer_1"], model=partial(tiny_model, "xlnet", "seq-cls"), task="SEQ_CLS"
    ),
    "vision-under-other-names": _good(
        r".*vision_model.*\.q_proj", model=partial(tiny_model, "mllama", "image-text-to-text"), task=None
    ),
    "text-and-vision": _good(
        ["v_proj", "lm_head"], model=partial(tiny_model, "mllama", "image-text-to-text"), task=None
    ),
    "shared-embeddings": _good(
        ["q_proj", "embed_tokens"], model=partial(_classifier, AutoModelForSeq2SeqLM, "bart"), task="SEQ_2_SEQ_LM"
    ),
    "biased-reward": _good(["c_attn"], model=partial(tiny_model, "gpt2", "seq-cls"), bias="all", task="SEQ_CLS"),
    "deberta": _good(
        ["query_proj"],
        model=partial(tiny_model, "deberta-v2", "seq-cls"),
        modules_to_save=["pooler", "classifier"],
        task="SEQ_CLS",
    ),
    "t5-classifier": _good(
        ["q", "v"], model=partial(tiny_model, "t5", "seq-cls"), modules_to_save=["classification_head"], task="SEQ_CLS"
    ),
    "speech": _good(model=_whisper, task=None),
    "reward": _good(model=_reward, task="SEQ_CLS"),
    "reward-by-class": _good(model=_reward, modules_to_save=["score"], task=None),
    "distilbert": _good(
        ["q_lin"],
        model=partial(tiny_model, "distilbert", "seq-cls"),
        modules_to_save=["pre_classifier"],
        task="SEQ_CLS",
    ),
    "bart": _good(
        model=partial(tiny_model, "bart", "seq-cls"), modules_to_save=["classification_head"], task="SEQ_CLS"
    ),
    "tokens-classified": _good(
        ["query"], model=partial(_classifier, AutoModelForTokenClassification, "bert"), task="TOKEN_CLS"
    ),
    "questions": _good(
        ["query"], model=partial(_classifier, AutoModelForQuestionAnswering, "bert"), task="QUESTION_ANS"
    ),
    "images": _good(model=_vit, modules_to_save=["classifier"], task=None),
}
"""Name → how it is made. Each is what `save_pretrained` writes, trained a little, so that no delta is zero."""


def make(name: str, root: Path) -> tuple[Path, Path | None]:
    """Write the good adapter `name`; return its folder and its base's, None where transformers has no such model."""
    good = GOOD[name]
    torch.manual_seed(0)
    model: Any = good.model().to(good.dtype)
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
        peft_model = get_peft_model(
            model,
            LoraConfig(task_type=good.task, **arguments),
            adapter_name=good.adapter_name,
            autocast_adapter_dtype=not good.sixteen_bit,
        )
        train_a_little(peft_model)
        peft_model.save_pretrained(str(root / "adapter"))
    folder = root / "adapter" if good.adapter_name == "default" else root / "adapter" / good.adapter_name
    _edit(folder, good)
    return folder, base


def train_a_little(model: torch.nn.Module) -> None:
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
    kept = raw if good.fields is None else {key: raw[key] for key in good.fields}
    config.write_text(json.dumps({**kept, **good.others}))
