"""The form of an adapter that each server takes, which `prepare` writes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lora_tool.adapter.view import AdapterView
from lora_tool.architectures.heads import PEFT_CLASSIFIERS, head_of
from lora_tool.keys import Part
from lora_tool.rules.engine.subjects import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingForm:
    """What a server takes. All but PEFT want one scaling, alpha / r, which is 1 in what is written."""

    name: str
    """What it is called in messages."""
    one_rank: bool = True
    """Whether it has one rank for all modules."""
    heads: bool = False
    """Whether it takes heads of classifiers that were saved whole."""
    whole: bool = False
    """Whether it takes all modules that were saved whole."""
    fused: bool = False
    """Whether it reads LoRA on fused experts as PEFT packs it."""
    mlx: bool = False
    """Whether factors are transposed, under names of its own."""


FORMS: Mapping[Server, ServingForm] = {
    Server.PEFT: ServingForm(name="PEFT", one_rank=False, heads=True, whole=True, fused=True),
    Server.VLLM: ServingForm(name="vLLM", heads=True, fused=True),
    Server.SGLANG: ServingForm(name="SGLang"),
    Server.LLAMA_CPP: ServingForm(name="llama.cpp"),
    Server.MLX: ServingForm(name="MLX-LM", mlx=True),
}
"""vLLM as of `vllm/lora/peft_helper.py` and `lora_model.py`, SGLang of `python/sglang/srt/lora/`, llama.cpp of
`convert_lora_to_gguf.py`, MLX-LM of `mlx_lm/tuner/utils.py`, all of autumn 2026."""


def in_the_way(view: AdapterView, form: ServingForm) -> Iterator[str]:
    """Yield what of the adapter the server has no exact form for."""
    config = view.config
    if config.use_dora or any(layer.magnitude is not None for layer in view.layers):
        yield "DoRA, which scales the rows of W + ΔW: its change is not a product of two factors"
    if form.whole:
        return
    if config.lora_bias:
        yield f"`lora_bias`: {form.name} has no place for LoRA's change of biases"
    if config.bias != "none":
        yield f'`bias` "{config.bias}": {form.name} has no place for trained biases'
    if view.tokens or config.token_indices:
        yield f"single trained tokens, which {form.name} does not take"
    if config.target_parameters and not form.fused:
        yield f"LoRA on fused experts (`target_parameters`), which {form.name} reads as one tensor for each expert"
    saved = sorted({item.module for item in view.parts(Part.PLAIN, Part.SAVED_MODULE)})
    others = [module for module in saved if not (form.heads and head_of(module) in PEFT_CLASSIFIERS)]
    if others:
        yield f"`{others[0]}` saved whole, which {form.name} does not load with an adapter"
