"""Modules whose LoRA a server loads with the rest and then leaves out, at most with a warning in its log.

vLLM wraps the modules of the language model (`vllm/lora/model_manager.py`), SGLang those that a model's
`should_apply_lora` names, and llama.cpp's converter skips the others (`filter_tensors`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lora_tool.adapters.experts import STACKED_BY_PEFT, UNKNOWN_TO_PEFT
from lora_tool.adapters.view import LoraLayer
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.ends import MATRIX

_OUTSIDE = re.compile(
    r"(?:^|\.)(?:(?:high_res_)?vision|visual|audio|image|video|speech|embed_(?:audio|vision)|language_projection|qformer"
    r"|aligner|merger|connector|(?:\w+_)?projector)(?:_\w+)?\."
)
"""What transformers' multimodal models call all that is not the language model: encoders, and what leads from them."""


TOWERS = "--enable-tower-connector-lora"
"""What vLLM is started with to have LoRA outside of the language model."""


def is_outside(name: str) -> bool:
    """Return whether a module or a tensor, by its name, is outside of a multimodal model's language model."""
    return _OUTSIDE.search(f"{name}.") is not None


def outside_language(layers: Sequence[LoraLayer]) -> list[str]:
    """Return the modules outside of a multimodal model's language model."""
    return [layer.target for layer in layers if is_outside(layer.target)]


def hides_experts(config: ModelConfig) -> bool:
    """Return whether PEFT finds no LoRA on single experts in such a model, since transformers 5 stacks them."""
    nested = config.raw.get("text_config")
    kinds = (config.model_type, nested.get("model_type") if isinstance(nested, dict) else None)
    unknown = any(isinstance(kind, str) and kind in UNKNOWN_TO_PEFT for kind in kinds)
    return unknown and config.model_type not in STACKED_BY_PEFT


def packed_queries(layers: Sequence[LoraLayer]) -> list[str]:
    """Return GPT-BigCode's q, k and v in one matrix, where all queries share one k and v.

    vLLM 0.32 runs this model through transformers and makes a parallel layer of the matrix, which it does not list
    among those that LoRA is on; with k and v for every head (3·in rows) it makes none.
    """
    return [
        layer.target
        for layer in layers
        if layer.target.endswith(".attn.c_attn")
        and layer.pair is not None
        and all(len(factor.shape) == MATRIX for factor in layer.pair)
        and layer.pair[1].shape[0] != 3 * layer.pair[0].shape[1]
    ]
