"""What MLX-LM calls the modules of an adapter: it has classes with an output layer alone, some with names of their own.

It refuses an adapter with a tensor that its model does not have (`mlx_lm/tuner/utils.py`, `load_adapters`). Its models
have transformers' names below their layers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType

from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.core.display import named
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import split_layer
from lora_tool.plans.algebra.whole_model import SAME, Beginnings
from lora_tool.rules.serving.forms import ROUTER, USUAL_LAYERS, layers_of

_MULTIMODAL = (
    "gemma3 gemma4 kimi_k25 kimi_vl lfm2_vl lfm2-vl llama4 llava mistral3 pixtral qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe "
    "qwen3_vl qwen3_vl_moe"
)
_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "model.h",
        "gpt_neox": "model.h",
        "gptj": "model.h",
        "nemotron_h": "backbone.layers",
        "gemma3n": "model.language_model.layers",
        **dict.fromkeys(_MULTIMODAL.split(), "language_model.model.layers"),
    }
)
"""Where the classes of `mlx_lm/models/` have their layers, by model type, if that is not where transformers has them."""
_STORED_ROUTER = ".block_sparse_moe.gate"
"""What Mixtral calls its router on disk, and MLX-LM in memory."""


def mlx_beginnings(view: AdapterView, base: ModelDir | None) -> Beginnings:
    """Return how module paths begin in the class that the adapter was trained on, and in MLX-LM's.

    Raises `UnsupportedAdapter` where only the base tells, and for modules that MLX-LM does not have.
    """
    modules = [layer.target for layer in view.layers]
    found = sorted({layers_of(module) for module in modules if split_layer(module)[0] is not None})
    if len(found) > 1:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: LoRA on {named(found, 3)}, but MLX-LM has the layers of the text model alone",
            hint=f"merge it instead: lora-tool merge {shlex.quote(str(view.adapter.root))}",
        )
    if not found:
        return SAME
    (own,) = found
    theirs = own if base is None and own in USUAL_LAYERS else _theirs(own, base)
    if theirs is None:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: `{own}` is where some models have their layers, but MLX-LM's classes have an output layer and "
            "other paths, which only the base tells",
            hint=f"lora-tool prepare {shlex.quote(str(view.adapter.root))} --for mlx --base MODEL -o OUT",
        )
    (before, _, last), (new, _, name) = own.rpartition("."), theirs.rpartition(".")
    if last == name:
        return Beginnings(text=_dotted(before), whole=_dotted(new))
    outside = [module for module in modules if split_layer(module)[0] is None]
    if outside:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: LoRA on {named(outside, 3)}, which MLX-LM's model calls otherwise",
            hint=f"merge it instead: lora-tool merge {shlex.quote(str(view.adapter.root))}",
        )
    return Beginnings(text=_dotted(own), whole=_dotted(theirs))


def mlx_path(module: str, names: Beginnings, base: ModelDir | None) -> str:
    """Return the path that MLX-LM's model has a module under; only the base tells what it calls routers."""
    path = names.path(module)
    stored = path.removesuffix(ROUTER) + _STORED_ROUTER
    return stored if path.endswith(ROUTER) and base is not None and f"{stored}.weight" in base.tensors else path


def _theirs(own: str, base: ModelDir | None) -> str | None:
    """Return where MLX-LM has the layers; None without the base."""
    if base is None or base.config is None:
        return None
    known = _LAYERS.get(base.config.model_type or "")
    if known is not None:
        return known
    # what is not in the table has the names of checkpoints with an output layer
    stored = {layers_of(name) for name in base.tensors if split_layer(name)[0] is not None}
    fitting = {each for each in stored if each.endswith(f".{own}")}
    return own if "." in own else fitting.pop() if len(fitting) == 1 else f"model.{own}"


def _dotted(path: str) -> str:
    return f"{path}." if path else ""
