"""Causal language models with a classifier whose `score` layer reads what their output layer reads.

transformers puts `score`, a linear layer without a bias, on the hidden state of the last token that is not padding: of
these classes the state that the output layer reads there, so that rows of the output layer give in `score` the logits
of their tokens (5.23; `tests/oracle/test_judges.py` compares each with it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.ends import LANGUAGE_MODELS
from lora_tool.models.table import architecture_of

_STORED_AS_IN_MEMORY = frozenset(
    """
    arcee biogpt bloom diffllama doge exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_oss gptj
    helium hunyuan_v1_dense jetmoe llama minicpm3 ministral ministral3 mistral mpt nemotron olmo olmo2 olmo3 openai-gpt opt
    persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
    """.split()  # noqa: SIM905 - a table
)
"""Model types whose classes the table of architectures has."""
_OTHERS = {
    "deepseek_v2": "DeepseekV2ForSequenceClassification",
    "deepseek_v3": "DeepseekV3ForSequenceClassification",
    "gemma3": "Gemma3ForSequenceClassification",
    "gpt_neox": "GPTNeoXForSequenceClassification",
    "hunyuan_v1_moe": "HunYuanMoEV1ForSequenceClassification",
    "jamba": "JambaForSequenceClassification",
    "minimax": "MiniMaxForSequenceClassification",
    "mixtral": "MixtralForSequenceClassification",
    "phimoe": "PhimoeForSequenceClassification",
    "qwen2_moe": "Qwen2MoeForSequenceClassification",
    "qwen3_5": "Qwen3_5ForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "qwen3_next": "Qwen3NextForSequenceClassification",
    "zamba": "ZambaForSequenceClassification",
}
JUDGE_TYPES = _STORED_AS_IN_MEMORY | _OTHERS.keys()
"""All of them."""
_SOFT_CAP = "final_logit_softcapping"
_CAPPED = {"gemma2": 30.0}
"""The soft cap of a config that does not name one."""
SERVE_IT = "serve the model as it is, and subtract the logits of the two tokens from one another"
_A_JUDGE = "give a model that writes its answer, or a classifier with a head of one layer"


class JudgeClass(Struct, frozen=True, kw_only=True):
    """The classifier of a causal language model."""

    classifier: str
    factor: float = 1.0
    """What the language model multiplies its output layer's results with."""


def judge_class(config: ModelConfig) -> JudgeClass:
    """Return the classifier of a model with this config.

    Raises `UnsupportedAdapter` where no class is known whose scores are the logits: by what is in the way.
    """
    model_type = config.model_type or ""
    row = architecture_of(model_type)
    named = _OTHERS.get(model_type)
    if named is None and row is not None and model_type in _STORED_AS_IN_MEMORY:
        named = row.sequence_classification
    writes = not config.architectures or config.architectures[0].endswith(LANGUAGE_MODELS)
    if named is None or config.custom_code or not writes:
        raise UnsupportedAdapter(f"{config.path}: {_why_none(config)}", hint=SERVE_IT if writes else _A_JUDGE)
    inner = config.raw.get("text_config")
    fields = {**config.raw, **(inner if isinstance(inner, dict) else {})}
    cap = fields.get(_SOFT_CAP, _CAPPED.get(model_type))
    if cap is not None:
        raise UnsupportedAdapter(
            f"{config.path}: `{_SOFT_CAP}` {cap} bends each logit (cap·tanh(z/cap)), which no linear layer does",
            hint=SERVE_IT,
        )
    return JudgeClass(classifier=named, factor=_factor(model_type, fields))


def _why_none(config: ModelConfig) -> str:
    model_type = config.model_type
    row = architecture_of(model_type or "")
    if config.custom_code:
        return f"a {model_type} is code in the checkpoint (`auto_map`), which lora-tool does not run"
    if config.architectures and not config.architectures[0].endswith(LANGUAGE_MODELS):
        return f"a {config.architectures[0]} has no output layer whose logits could be scores"
    if row is not None and len({name.rpartition(".")[0] for name in row.causal_only}) > 1:
        return f"the output layer of a {model_type} follows other layers that its classifier does not have"
    if row is not None and row.sequence_classification is None:
        return f"transformers has no sequence classifier of model_type {model_type}"
    if row is not None and row.head != "score":
        return f"the classifier of a {model_type} has a head of its own, `{row.head}`, not a linear layer on what the output layer reads"
    return f"lora-tool knows no sequence classifier of model_type {model_type} that scores what the output layer reads"


def _factor(model_type: str, fields: Mapping[str, Any]) -> float:
    """Return what the model multiplies its logits with: MiniCPM3 divides the hidden state before the output layer."""
    if model_type != "minicpm3":
        return 1.0
    hidden = float(fields.get("hidden_size", 2560))
    return float(fields.get("dim_model_base", 256) or hidden) / hidden
