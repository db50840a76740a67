"""Adapters of every feature that PEFT has, made by PEFT on tiny models: what merges and rules are tried on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.tuners.lora.config import BdLoraConfig, KasaConfig
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.oracle.peft_merge import BF16, FP16, FP32, save_model, saved_tensors, train
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, tiny_config, tiny_model

BY_THE_TASK = "by the task"
TASK_TYPES: Mapping[Task, str] = {
    "causal-lm": "CAUSAL_LM",
    "seq-cls": "SEQ_CLS",
    "token-cls": "TOKEN_CLS",
    "question-ans": "QUESTION_ANS",
    "seq-2-seq-lm": "SEQ_2_SEQ_LM",
    "feature-extraction": "FEATURE_EXTRACTION",
    "image-text-to-text": "CAUSAL_LM",
}
Edit = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A base, an adapter that PEFT made on it, and what is done to the folders afterwards."""

    model: str = "llama"
    lora: Mapping[str, Any] = field(default_factory=dict)
    task: Task = "causal-lm"
    """Of the class that is trained."""
    base_task: Task | None = None
    """Of the base's class, where it is another."""
    own: str | None = None
    """The class of both, where no auto class has it."""
    task_type: str | None = BY_THE_TASK
    dtype: torch.dtype = BF16
    adapter_dtype: torch.dtype | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config."""
    tied: bool | None = None
    """None where the ends are as the class has them."""
    labels: int = NUM_LABELS
    rows: int | None = None
    """Of the embeddings that are resized before the training."""
    experts: bool = False
    """All stacks of experts have LoRA, too."""
    save: bool | str = False
    """Whether PEFT saves the embeddings besides."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `get_peft_model`."""
    edit_base: Edit | None = None
    edit: Edit | None = None
    """What is done to the adapter's folder."""
    refused: str | None = None
    """Why no merge has PEFT's bits."""
    served: bool = True
    """False where PEFT, as a server, does not repeat the training's init."""

    def make(self) -> PreTrainedModel:
        if self.own is not None:
            model: PreTrainedModel = getattr(transformers, self.own)(tiny_config(self.model, "feature-extraction"))
            return model
        ends: dict[str, Any] = {} if self.tied is None else {"tie_word_embeddings": self.tied}
        return tiny_model(self.model, self.base_task or self.task, **self.config, **ends)

    def load(self, base: Path) -> PreTrainedModel:
        """Return the model that is trained, as PEFT's users load it."""
        auto = AUTO[self.task] if self.own is None else getattr(transformers, self.own)
        labelled = self.task in ("seq-cls", "token-cls") or self.labels != NUM_LABELS
        labels = {"num_labels": self.labels, "ignore_mismatched_sizes": True} if labelled else {}
        model: PreTrainedModel = auto.from_pretrained(base, dtype="auto", **labels)
        if self.rows is not None:
            model.resize_token_embeddings(self.rows)
        return model

    def write(self, folder: Path, dtype: torch.dtype | None = None) -> tuple[Path, Path]:
        """Write both folders and return them."""
        torch.manual_seed(0)
        base = save_model(self.make(), folder / "base", dtype or self.dtype)
        if self.edit_base is not None:
            self.edit_base(base)
        return base, self.trained(base, folder / "adapter")

    def trained(self, base: Path, folder: Path) -> Path:
        """Write an adapter of the base, and return its folder."""
        model, lora = self.load(base), {"target_modules": "all-linear", **self.lora}
        if self.experts:
            lora["target_parameters"] = experts(model) or None
        lora["task_type"] = TASK_TYPES[self.task] if self.task_type == BY_THE_TASK else self.task_type
        train(model, folder, save=self.save, options=self.options, **lora)
        adapter: Path = folder / self.options.get("adapter_name", ".")
        if self.adapter_dtype is not None:
            table = {name: tensor.to(self.adapter_dtype) for name, tensor in saved_tensors(adapter).items()}
            save_file(table, adapter / "adapter_model.safetensors")
        if self.edit is not None:
            self.edit(adapter)
        return adapter

    @property
    def summed(self) -> bool:
        """Whether each changed weight is W + s·B·A, so that a sum in float32 has a bound of its own."""
        targets = self.lora.get("target_modules", ())
        other = self.lora.get("use_dora") or self.lora.get("target_parameters") or self.experts
        embeddings = {"embed_tokens", "wpe"} & set(targets) and not isinstance(targets, str)
        return not (other or embeddings or self.lora.get("init_lora_weights") in ("pissa", "olora"))


_FIELDS = {each.name for each in fields(Case)}


def case(model: str = "llama", **given: Any) -> Case:
    """Return a case; what is no field of `Case` is one of LoraConfig."""
    lora = {name: value for name, value in given.items() if name not in _FIELDS}
    return Case(model=model, lora=lora, **{name: value for name, value in given.items() if name in _FIELDS})


def experts(model: PreTrainedModel) -> list[str]:
    """Return the ends of the names of all stacks of experts' matrices."""
    stacks = (name for name, parameter in model.named_parameters() if parameter.dim() == 3 and "expert" in name)
    return sorted({".".join(name.split(".")[-2:]) for name in stacks if not name.endswith("bias")})


def config_with(*, only: str | None = None, **others: Any) -> Edit:
    """Return the edit of an adapter's config to what another version, or an init with data of its own, writes."""

    def edit(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({name: raw[name] for name in (only.split() if only else raw)} | others))

    return edit


def _named_in_memory(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    table = {name.replace(".weight", ".default.weight"): tensor for name, tensor in load_file(path).items()}
    save_file(table, path, metadata={"format": "pt"})


_OLD = """base_model_name_or_path bias fan_in_fan_out inference_mode init_lora_weights lora_alpha lora_dropout
modules_to_save peft_type r target_modules task_type"""
QV = ["q_proj", "v_proj"]
ENDS = ["embed_tokens", "lm_head"]
CONV1D: dict[str, Any] = {"fan_in_fan_out": True}
_BLOCKS = BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False)
_EVERYTHING: dict[str, Any] = {
    "target_modules": [*QV, "down_proj"],
    "use_rslora": True,
    "use_dora": True,
    "bias": "all",
    "rank_pattern": {"down_proj": 6},
    "alpha_pattern": {"q_proj": 3},
    "modules_to_save": ["norm"],
    "trainable_token_indices": [4],
    "exclude_modules": ["layers.1.mlp.down_proj"],
}
FEATURES: Mapping[str, Case] = {
    "linear": case(),
    "linear-of-gpt": case("openai-gpt", dtype=FP16, **CONV1D),
    "linear-tied": case("qwen2", tied=True),
    "rslora": case(r=6, use_rslora=True),
    "rslora-gpt2": case("gpt2", r=3, use_rslora=True, **CONV1D),
    "patterns": case(
        rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 5, r".*\.0\..*v_proj": 3},
        alpha_pattern={"k_proj": 3, "^model.layers.0.mlp.up_proj": 11},
    ),
    "lora-bias": case("qwen2", target_modules=QV, lora_alpha=3, lora_bias=True),
    "lora-bias-opt": case("opt", dtype=FP16, lora_alpha=3, lora_bias=True),
    "saved-norms": case(target_modules=QV, modules_to_save=["input_layernorm", "norm"]),
    "saved-layer-norm": case("opt", target_modules=QV, modules_to_save=["final_layer_norm"]),
    "saved-untied-head": case(target_modules=QV, modules_to_save=["lm_head"]),
    "saved-ends": case(target_modules=QV, modules_to_save=ENDS),
    "saved-block": case(target_modules=["q_proj"], modules_to_save=["mlp"]),
    "saved-by-path": case(target_modules=QV, modules_to_save=["model.norm", "layers.0.mlp.up_proj"]),
    "regex": case(target_modules=r".*layers\.1\..*(q|o)_proj"),
    "regex-with-layers": case(target_modules=r"model\.layers\.(0|1)\.(self_attn\.[qv]_proj|mlp\.down_proj)"),
    "one-module": case(target_modules=["model.layers.1.mlp.up_proj"]),
    "layers": case(target_modules=QV, layers_to_transform=[1], layers_pattern="layers"),
    "layers-as-list": case(target_modules=QV, layers_to_transform=[0, 1], layers_pattern=["layers", "blocks"]),
    "layers-without-pattern": case(target_modules=[*QV, "embed_tokens"], layers_to_transform=0),
    "excluded": case(target_modules=[*QV, "up_proj"], exclude_modules=["up_proj", "layers.0.self_attn.q_proj"]),
    "excluded-one-by-one": case(
        target_modules=[*QV, "up_proj"], exclude_modules=[f"layers.{n}.mlp.up_proj" for n in range(2)]
    ),
    "excluded-by-regex": case(exclude_modules=r".*layers\.0.*|.*down_proj"),
    "adapter-bf16": case(adapter_dtype=BF16),
    "adapter-fp16-base-fp32": case("qwen2", dtype=FP32, adapter_dtype=FP16),
    "trained-in-16-bits": case(target_modules=[*QV, "embed_tokens"], options={"autocast_adapter_dtype": False}),
    "rank-1": case(r=1, lora_alpha=0.5),
    "rank-64": case(r=64, lora_alpha=16),
    "negative-alpha": case(target_modules=QV, lora_alpha=-8),
    "dora": case(use_dora=True),
    "dora-rslora": case("qwen2", use_dora=True, use_rslora=True),
    "dora-conv1d": case("gpt2", use_dora=True, **CONV1D),
    "dora-embedding": case(use_dora=True, target_modules=["embed_tokens", "q_proj"]),
    "dora-embedding-positions": case(
        "gpt2", use_dora=True, use_rslora=True, target_modules=["wpe", "c_fc"], lora_alpha=8, **CONV1D
    ),
    "dora-under-other-names": case("gpt_oss", use_dora=True, target_modules=["q_proj", "o_proj"]),
    "dora-of-a-mixture": case("olmoe", use_dora=True, target_modules=["q_proj", "o_proj"]),
    "pissa": case(init_lora_weights="pissa"),
    "pissa-conv1d": case("gpt2", init_lora_weights="pissa", lora_alpha=3, **CONV1D),
    "pissa-of-a-rank-beyond-the-matrix": case(init_lora_weights="pissa", r=64),
    "pissa-beside-an-embedding": case(init_lora_weights="pissa", r=48, target_modules=["embed_tokens", "q_proj"]),
    "olora": case("qwen2", init_lora_weights="olora", use_rslora=True),
    "olora-of-a-rank-beyond-the-matrix": case(init_lora_weights="olora", r=64, use_rslora=True),
    "orthogonal": case(target_modules=QV, init_lora_weights="orthogonal"),
    "gaussian": case(target_modules=QV, init_lora_weights="gaussian"),
    "random-init": case(target_modules=QV, init_lora_weights=False),
    "eva": case(target_modules=QV, init_lora_weights="eva"),
    "embedding": case(target_modules=["embed_tokens", "q_proj"]),
    "embedding-rslora": case(target_modules=["embed_tokens"], r=6, use_rslora=True),
    "embedding-and-lm-head": case(target_modules=[*ENDS, "o_proj"]),
    "embedding-gpt2-positions": case("gpt2", target_modules=["wpe", "c_attn"], **CONV1D),
    "tokens": case(target_modules=QV, trainable_token_indices=[1, 5, 3]),
    "tokens-tied": case("qwen2", tied=True, trainable_token_indices={"embed_tokens": [0, 2]}),
    "tokens-by-name": case(target_modules=QV, trainable_token_indices={"embed_tokens": [1], "lm_head": [1]}),
    "tokens-and-lm-head": case(target_modules=["v_proj", "lm_head"], trainable_token_indices=[1, 2]),
    "saved-embedding-of-tied": case("qwen2", tied=True, modules_to_save=["embed_tokens"]),
    "saved-lm-head-of-tied": case("qwen2", tied=True, modules_to_save=["lm_head"]),
    "saved-both-of-tied": case("qwen2", tied=True, modules_to_save=ENDS),
    "saved-as-tied": case(tied=True, target_modules=QV, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "bias-all": case("qwen2", bias="all"),
    "bias-lora-only": case("qwen2", lora_alpha=8, bias="lora_only", target_modules=QV),
    "bias-all-conv1d": case("gpt2", bias="all", **CONV1D),
    "bias-all-phi": case("phi", bias="all"),
    "lora-bias-on-a-trained-bias": case("opt", tied=False, lora_bias=True, bias="lora_only"),
    "lora-bias-on-a-trained-bias-conv1d": case("gpt2", lora_bias=True, bias="all", **CONV1D),
    "everything": case("qwen2", **_EVERYTHING),
    "experts-of-mixtral": case("mixtral", target_modules=["q_proj"], experts=True),
    "experts-of-qwen3-moe": case("qwen3_moe", target_modules=["q_proj"], experts=True),
    "one-expert-parameter": case(
        "mixtral", target_modules=[], target_parameters=["experts.down_proj"], rank_pattern={"experts.down_proj": 2}
    ),
    "matrix-parameters": case(target_modules=[], target_parameters=["q_proj.weight", "mlp.up_proj.weight"]),
    "matrix-parameter-conv1d": case("gpt2", target_modules=[], target_parameters=["c_attn.weight"]),
    "named-in-memory": case(target_modules=QV, edit=_named_in_memory),
    "named-adapter": case(target_modules=QV, options={"adapter_name": "policy"}),
    "old-peft": case(target_modules=QV, edit=config_with(only=_OLD)),
    "oldest-peft": case(
        target_modules=QV, edit=config_with(only=_OLD, enable_lora=None, merge_weights=False, lora_alpha=7.0)
    ),
    "newer-peft": case(target_modules=QV, edit=config_with(lora_magic={"depth": 3}, peft_version="9.0.0")),
    # classes with heads, and heads that PEFT does or does not save
    "features": case(task="feature-extraction", target_modules=QV),
    "reward": case(task="seq-cls", config={"num_labels": 1}, labels=1, target_modules=QV, use_rslora=True),
    "reward-without-task-type": case(
        task="seq-cls", task_type=None, target_modules=QV, modules_to_save=["score"], use_dora=True
    ),
    "reward-with-embeddings": case("qwen2", task="seq-cls", modules_to_save=["score", "embed_tokens"]),
    "reward-with-biases": case("gpt2", task="seq-cls", target_modules=["c_attn"], bias="all", **CONV1D),
    "two-layer-head": case("camembert", task="seq-cls", target_modules=["key", "dense"], bias="all"),
    "head-called-as-anothers": case("xlnet", task="seq-cls", target_modules=["summary", "layer_1"]),
    "distilbert": case("distilbert", task="seq-cls", target_modules=["q_lin"], modules_to_save=["pre_classifier"]),
    "bart": case("bart", task="seq-cls", target_modules=QV, modules_to_save=["classification_head"]),
    "deberta": case(
        "deberta-v2", task="seq-cls", target_modules=["query_proj"], modules_to_save=["pooler", "classifier"]
    ),
    "t5-classifier": case("t5", task="seq-cls", target_modules=["q", "v"], modules_to_save=["classification_head"]),
    "one-tensor-of-biases": case("jina_embeddings_v3", task="seq-cls", target_modules=["q_proj"], bias="all"),
    "vision-under-other-names": case(
        "mllama", task="image-text-to-text", task_type=None, target_modules=r".*vision_model.*\.q_proj"
    ),
    "text-and-vision": case("mllama", task="image-text-to-text", task_type=None, target_modules=["v_proj", "lm_head"]),
    # what is not merged with PEFT's bits
    "tied-output": case(tied=True, target_modules=["lm_head", "q_proj"], refused="ties to the other end"),
    "mamba": case("mamba", target_modules=["x_proj", "in_proj", "embeddings"], refused="ties to the other end"),
    "shared-embeddings": case(
        "bart",
        task="seq-2-seq-lm",
        target_modules=["q_proj", "embed_tokens"],
        refused="is one layer in several places",
    ),
    "matrix-parameters-olora": case(
        target_modules=[],
        target_parameters=["q_proj.weight"],
        init_lora_weights="olora",
        r=64,
        dtype=FP32,
        refused="olora with `target_parameters`",
    ),
    "pissa-niter": case(
        target_modules=QV, init_lora_weights="pissa_niter_4", r=64, served=False, refused="its randomised SVD"
    ),
    "corda": case(
        target_modules=QV,
        edit=config_with(init_lora_weights="corda", corda_config={"rho": 0.1}),
        served=False,
        refused="covariances",
    ),
    "lora-ga": case(
        target_modules=QV,
        edit=config_with(init_lora_weights="lora_ga", lora_ga_config={}),
        served=False,
        refused="gradients",
    ),
    "loftq": case(
        target_modules=QV,
        edit=config_with(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}),
        refused="PEFT changes the base weights when it builds the layer",
    ),
    "layer-replication": case(target_modules=QV, layer_replication=[[0, 2], [1, 2]], refused="layer replication"),
    "activated": case(target_modules=QV, alora_invocation_tokens=[5, 6], refused="activated LoRA"),
    "block-diagonal": case(target_modules=QV, use_bdlora=_BLOCKS, refused="block-diagonal LoRA"),
    "kasa": case(target_modules=QV, kasa_config=KasaConfig(), refused="KaSA"),
}
