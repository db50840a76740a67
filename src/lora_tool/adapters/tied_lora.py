"""LoRA on both ends of tied embeddings: what PEFT trains as one under `ensure_weight_tying`, and when it loads both."""

from __future__ import annotations

from collections.abc import Iterable

from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.formats.adapter_config import INITS_RECOMPUTED, AdapterConfig
from lora_tool.formats.patterns import compiled
from lora_tool.formats.stored import same_transposed, same_values
from lora_tool.models.ends import is_end

_NAMES = frozenset({"embed_tokens", "lm_head"})
"""The ends that PEFT looks for among the targets before it ties any (peft 0.21, `EMBEDDING_LAYER_NAMES`)."""


def add_the_same(view: AdapterView, embedding: str, output: str) -> bool:
    """Return whether the adapter's LoRA adds the same ΔW to the modules `embedding` and `output`.

    Under `ensure_weight_tying` it does: the factors of one are the other's, transposed. Then the shared matrix of tied
    ends is W + ΔW, and serves both as they were trained. Reads the factors; raises as `read_part`.
    """
    layers = {layer.module: layer for layer in view.layers}
    first, last = layers.get(embedding), layers.get(output)
    if first is None or last is None or view.config.init_lora_weights in INITS_RECOMPUTED:
        return False
    one, other = (view.frozen.get(f"{module}.weight") for module in (embedding, output))
    if other is not None and (one is None or not same_values(one, other)):
        return False
    return first.embedding and not last.embedding and _same_factors(first, last)


def _same_factors(embedding: LoraLayer, output: LoraLayer) -> bool:
    if embedding.pair is None or output.pair is None or embedding.scaling != output.scaling:
        return False
    if any(part is not None for each in (embedding, output) for part in (each.magnitude, each.bias)):
        return False
    (first, last), (a, b) = embedding.pair, output.pair
    return same_transposed(first, b) and same_transposed(last, a)


def is_lost_on_loading(config: AdapterConfig, layer: LoraLayer, *, tied: bool | None) -> bool:
    """Return whether PEFT drops LoRA that it trained on an end of the model under `ensure_weight_tying` when it loads it.

    It saves the embedding among the targets in place of the output layer, and ties the two again only on a base that
    is `tied` (None where no base tells) and where a target has a name that it knows.
    """
    if not (config.ensure_weight_tying and is_end(layer.target)) or config.targets(layer.target):
        return False
    return tied is False or not _names_an_end(config)


def saved_as_one(config: AdapterConfig, output: str, *, held: bool) -> bool:
    """Return whether PEFT trained an end that it saved whole and what it is tied to as one matrix.

    Under `ensure_weight_tying` it does where an end had a name that it knows. It names the embedding alone then, and
    saves both: the module `output` is `held`, and the config does not name it.
    """
    if not config.ensure_weight_tying:
        return False
    return _knows_one(config.modules_to_save) or (held and not config.saves(output))


def _names_an_end(config: AdapterConfig) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        return any(compiled(targets).fullmatch(name) for name in _NAMES)
    return _knows_one(targets or ())


def _knows_one(entries: Iterable[str]) -> bool:
    return any(entry.rpartition(".")[2] in _NAMES for entry in entries)
