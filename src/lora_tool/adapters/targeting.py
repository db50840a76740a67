"""Which tensors an adapter's config explains, by the way that PEFT matches names (peft 0.21)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from lora_tool.adapters.view import AdapterView, LoraLayer, WholeTensor
from lora_tool.formats.adapter_config import INITS_OF_A_MATRIX, INITS_RECOMPUTED, AdapterConfig
from lora_tool.formats.patterns import compiled
from lora_tool.formats.stored import same_transposed, same_values
from lora_tool.models import ARCHITECTURES
from lora_tool.models.ends import ADDED_BY_PEFT, head_of, is_end

ALL_LINEAR = "all-linear"
"""What `target_modules` may say instead of names; PEFT replaces it by names when it saves, older ones did not."""


_VARIANT = re.compile(r"^(?P<module>.+?)\.lora_[A-Za-z_]+(\..*)?$", re.DOTALL)
"""A tensor of a variant of LoRA that has parameters of its own, such as KaSA's `lora_diag`."""


def is_all_linear(config: AdapterConfig) -> bool:
    """Return whether `target_modules` is the word all-linear."""
    return isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR


def layer_is_targeted(config: AdapterConfig, layer: LoraLayer) -> bool:
    """Return whether PEFT would put LoRA on the layer's module when it loads the adapter."""
    if is_all_linear(config) or config.targets(layer.target):
        return True
    if config.ensure_weight_tying and is_end(layer.target):
        return True  # PEFT puts it on both ends
    # inside a module that is targeted as a whole: the out_proj of a MultiheadAttention
    outer = layer.module.partition(".base_layer")[0]
    if outer != layer.module and config.targets(outer):
        return True
    return any(True for _ in parameters_of(config, layer.target))


def parameters_of(config: AdapterConfig, module: str) -> Iterator[str]:
    """Yield the entries of `target_parameters` that may lie in the module: ``mlp.experts.down_proj``."""
    for entry in config.target_parameters or ():
        parent = entry.rpartition(".")[0]
        if not parent or module == parent or module.endswith(f".{parent}"):
            yield entry


def parameter_is_targeted(config: AdapterConfig, name: str) -> bool:
    """Return whether `target_parameters` names the parameter with this name in the model."""
    return any(name == target or name.endswith(f".{target}") for target in config.target_parameters or ())


def ranks_of(config: AdapterConfig, layer: LoraLayer) -> frozenset[int]:
    """Return the ranks that the config may give the layer: more than one where it may be of several parameters."""
    ranks = {config.rank(layer.target)}
    if config.target_parameters and not config.targets(layer.target):
        names = {entry.rpartition(".")[2] for entry in parameters_of(config, layer.target)}
        ranks = {config.rank(f"{layer.target}.{name}") for name in names} or ranks
    if config.init_lora_weights.startswith(INITS_OF_A_MATRIX) and layer.pair is not None and not layer.embedding:
        a, b = layer.pair  # of a matrix, which has no more singular values than its smaller side
        ranks = {min(rank, *a.shape[1:], *b.shape[:1]) for rank in ranks}
    return frozenset(ranks)


def is_saved_whole(config: AdapterConfig, path: str) -> bool:
    """Return whether the module is, or lies in, one that PEFT saves whole.

    Classification and question answering tasks add their heads' names themselves.
    """
    if config.saves(path):
        return True
    return head_of(path) in ADDED_BY_PEFT.get(config.task_type or "", ())


def explains(config: AdapterConfig, item: WholeTensor) -> bool:
    """Return whether the config, or PEFT's own saving, accounts for a plain tensor."""
    path = item.module
    if is_saved_whole(config, path) or is_end(path) or head_of(path):
        return True
    variant = _VARIANT.match(item.name) if config.refused else None
    return bool(variant and config.targets(variant["module"])) or (item.leaf == "bias" and config.bias != "none")


_TASK_OF_CLASS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
_OF_CAUSAL_LMS = ("ForCausalLM", "LMHeadModel", *(row.causal_lm for row in ARCHITECTURES.values() if row.causal_lm))


def trained_for(config: AdapterConfig) -> str | None:
    """Return the task that the adapter was trained for by its config: its task type, else that of its trained class, or
    the class itself where it has no task type. None for a causal LM's class: its head is known only by its tensors.
    """
    name = config.trained_class
    if config.task_type or name is None or name.endswith(_OF_CAUSAL_LMS):
        return config.task_type
    return next((task for ending, task in _TASK_OF_CLASS.items() if name.endswith(ending)), name)


def is_of_base_model(class_name: str) -> bool:
    """Return whether a class of transformers is, by its name, a base model's, which has neither head nor output layer."""
    return class_name.endswith(("Model", "Encoder"))


def wrapped_parameters(config: AdapterConfig, names: Iterable[str]) -> dict[str, str]:
    """Return path of the wrapper, as in the adapter's names → the parameter of `target_parameters` that it adapts.

    `names` are the model's parameters in its own order: PEFT wraps a module once for each parameter, one wrapper around
    the other, so the last one of the module is outermost (peft 0.21, `BaseTuner._inject_parameters`).
    """
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in names if config.target_parameters else ():
        if parameter_is_targeted(config, name):
            by_module[name.rpartition(".")[0]].append(name)
    return {
        module + ".base_layer" * depth: name
        for module, targeted in by_module.items()
        for depth, name in enumerate(reversed(targeted))
    }


def ancestors(path: str) -> Iterator[str]:
    """Yield a module path and the paths of the modules that it lies in, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


# LoRA on both ends of tied embeddings: what PEFT trains as one under `ensure_weight_tying`, and when it loads both.


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
    is `tied` (None without a base) and where a target has a name that it knows.
    """
    if not (config.ensure_weight_tying and is_end(layer.target)) or config.targets(layer.target):
        return False
    return tied is False or not _names_an_end(config)


def saved_as_one(config: AdapterConfig, output: str, *, held: bool) -> bool:
    """Return whether PEFT trained an end that it saved whole and the end that it is tied to as one matrix.

    Under `ensure_weight_tying` it does where an end had a name that it knows. It then names only the embedding, and
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
