"""Modules whose LoRA a server reads only together with others', and those whose LoRA it leaves out.

SGLang's `normalize_qkv_proj` and `normalize_gate_up_proj` (`python/sglang/srt/lora/lora.py`, 0.5.23) start from the LoRA
on q and on gate: without them the first request with LoRA on k, v or up ends the server, and without LoRA on v the
adapter does not load. For experts, `lora_manager.py` wants both of their matrices.

PEFT 0.21 stacks the LoRA on single experts where transformers 5 has stacks (`utils/transformers_weight_conversion.py`).
It expects LoRA on gate and up under the path that they have where down has LoRA, too, and leaves it out elsewhere.

LoRA that is left out is loaded with the rest, at most with a warning in the log. vLLM wraps the modules of the
language model (`vllm/lora/model_manager.py`), SGLang those that a model's `should_apply_lora` names, and llama.cpp's
converter skips the others (`filter_tensors`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.experts import EXPERT, PROJECTIONS, STACKED_BY_PEFT, UNKNOWN_TO_PEFT
from lora_tool.adapters.view import LoraLayer
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.keys import split_layer
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.models.ends import MATRIX

_Partners = Mapping[str, tuple[str, ...]]
"""Module → the modules that must have LoRA where it has."""


class ReadTogether(Struct, frozen=True, kw_only=True):
    """The modules whose LoRA a server reads only together: the matrices of one expert, and the others of a layer."""

    in_experts: _Partners
    elsewhere: _Partners
    otherwise: str
    """Its reaction to LoRA on only some of them, as the end of a sentence."""
    stacks: bool = False
    """Whether it stacks the LoRA on experts: that of all experts of a layer, or of none."""
    as_peft: bool = False
    """Whether it does so for the models whose stacks PEFT knows, and no LoRA on gate and up is as good as zeros."""

    def is_of(self, model_type: str | None) -> bool:
        """Return whether it reads the LoRA of such a base this way."""
        return not self.as_peft or model_type in STACKED_BY_PEFT


_MIXTRALS = frozenset(PROJECTIONS[1])


def lacking(modules: Iterable[str], reads: ReadTogether) -> Mapping[str, str]:
    """Return which modules have no LoRA, though another is read only together with them, and that other.

    They may not exist, as some models have no gate: only the base shows that.
    """
    held, found = dict.fromkeys(modules), dict[str, str]()
    for module in held:
        parent, _, leaf = module.rpartition(".")
        partners = reads.in_experts if EXPERT.fullmatch(module) else reads.elsewhere
        for name in partners.get(leaf, ()):
            if f"{parent}.{name}" not in held:
                found.setdefault(f"{parent}.{name}", module)
    return found


def stacked_otherwise(config: AdapterConfig, forms: Mapping[str, tuple[int, float]]) -> str | None:
    """Return how PEFT misreads LoRA on single experts when it stacks it; None if ΔW stays the same.

    `forms` are the ranks and scalings of modules. PEFT takes both from `r` and `lora_alpha` for gate and up, doubled, with
    rsLoRA too, and from patterns that match the names of the stacks (`_convert_peft_config_moe`).
    """
    gate_up = r".*\.gate_up_proj"
    stacks = replace(
        config,
        rank_pattern={**config.rank_pattern, gate_up: 2 * config.r},
        alpha_pattern={**config.alpha_pattern, gate_up: 2 * config.lora_alpha},
    )
    for module, (rank, scaling) in forms.items():
        if match := EXPERT.fullmatch(module):
            in_two = any(match["projection"] in names[:2] for names in PROJECTIONS)
            path = f"{match['experts']}.{'gate_up_proj' if in_two else 'down_proj'}"
            taken = stacks.rank(path) / (1 + in_two)
            if taken != rank:
                return f"takes rank {taken:g} for `{module}`, which has rank {rank}, and refuses the adapter"
            if not math.isclose(stacks.scaling(path), scaling, rel_tol=1e-6):
                return f"scales LoRA on `{module}` by {stacks.scaling(path):.3g}, not by {scaling:.3g}"
    return None


def without_names(modules: Iterable[str]) -> Iterator[str]:
    """Yield the matrices of experts under Mixtral's names, which SGLang's `target_modules` do not reach."""
    matches = ((module, EXPERT.fullmatch(module)) for module in modules)
    return (module for module, match in matches if match and match["projection"] in _MIXTRALS)


def weight_beside(base: ModelDir, module: str, width: int) -> StoredTensor | None:
    """Return the base's weight of a module, by its path or by where it is in its layer; None where the base has none.

    A multimodal base may have several of them; `width` columns tell which is meant.
    """
    tensors = as_matrices(base).tensors
    exact = tensors.get(f"{module}.weight")
    number, _ = split_layer(module)
    if exact is not None or number is None:
        return exact
    ending = f".{number}.{module.partition(f'.{number}.')[2]}.weight"
    found = [tensor for name, tensor in tensors.items() if name.endswith(ending)]
    return next((each for each in found if len(found) == 1 or each.shape[1] == width), None)


_OUTSIDE = re.compile(
    r"(?:^|\.)(?:(?:high_res_)?vision|visual|audio|image|video|speech|embed_(?:audio|vision)|language_projection|qformer"
    r"|aligner|merger|connector|(?:\w+_)?projector)(?:_\w+)?\."
)
"""What transformers' multimodal models call all that is not the language model: encoders, and what leads from them."""


def is_outside(name: str) -> bool:
    """Return whether a module or a tensor, by its name, is outside of a multimodal model's language model."""
    return _OUTSIDE.search(f"{name}.") is not None


def outside_language(layers: Sequence[LoraLayer]) -> list[str]:
    """Return the modules outside of a multimodal model's language model."""
    return [layer.target for layer in layers if is_outside(layer.target)]


def model_types_of(base: ModelDir | None) -> tuple[str, ...]:
    """Return the model type of a base, and that of its text model; none without a base."""
    config = base.config if base else None
    if config is None:
        return ()
    nested = config.raw.get("text_config")
    kinds = (config.model_type, nested.get("model_type") if isinstance(nested, dict) else None)
    return tuple(kind for kind in kinds if isinstance(kind, str))


def hides_experts(base: ModelDir) -> bool:
    """Return whether PEFT finds no LoRA on single experts in such a model, since transformers 5 stacks them."""
    return not UNKNOWN_TO_PEFT.isdisjoint(model_types_of(base)) and base.whole_config.model_type not in STACKED_BY_PEFT


def path_with(module: str, names: Mapping[str, str | None]) -> str | None:
    """Return a module's path with the first part of it that is in `names` replaced; None where that has no other name."""
    for ours, theirs in names.items():
        before, found, after = f".{module}.".partition(f".{ours}.")
        if found:
            return None if theirs is None else f"{before}.{theirs}.{after}".strip(".")
    return module


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
