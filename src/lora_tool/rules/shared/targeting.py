"""Which tensors an adapter's config explains, by the way that PEFT matches names (peft 0.21)."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.adapter.view import LoraLayer
from lora_tool.architectures import CLASSIFICATION_HEADS
from lora_tool.formats.adapter_config import INITS_RECOMPUTED, AdapterConfig

ALL_LINEAR = "all-linear"
"""What `target_modules` may say instead of names; PEFT replaces it by names when it saves, older ones did not."""

ENDS = frozenset(
    {
        "embed_tokens",
        "lm_head",
        "wte",
        "word_embeddings",
        "embed_in",
        "embed_out",
        "shared",
        "embeddings",
        "proj_out",
        "output_projection",
    }
)
"""Names of input embeddings and output layers: PEFT saves them whole when the vocabulary was resized or targeted."""

VALUE_HEADS = frozenset({"v_head", "value_head", "reward_head", "regression_head"})
"""Names of the heads of PPO value models and of other trainers' reward models."""

QUESTION_HEADS = frozenset({"qa_outputs"})

_HEADS = CLASSIFICATION_HEADS | VALUE_HEADS | QUESTION_HEADS

_ADDED_HEADS = frozenset({"score", "classifier"})

CLASSIFICATION_TASKS = frozenset({"SEQ_CLS", "TOKEN_CLS"})


def head_of(path: str) -> str | None:
    """Return the head that a module path is or lies in: ``classifier`` of ``classifier.out_proj``. None if no head."""
    first = path.partition(".")[0]
    return first if first in _HEADS else None


def is_end(path: str) -> bool:
    """Return whether a module path is an input embedding or an output layer."""
    return path.rpartition(".")[2] in ENDS


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


def ranks_of(config: AdapterConfig, layer: LoraLayer) -> frozenset[int]:
    """Return the ranks that the config may give the layer: more than one where it may be of several parameters."""
    if not config.targets(layer.target):
        names = {entry.rpartition(".")[2] for entry in parameters_of(config, layer.target)}
        if names:
            return frozenset(config.rank(f"{layer.target}.{name}") for name in names)
    rank = config.rank(layer.target)
    if config.init_lora_weights in INITS_RECOMPUTED and layer.pair is not None and not layer.embedding:
        a, b = layer.pair  # factors of a matrix, which has no more than its smaller side
        rank = min(rank, *a.shape[1:], *b.shape[:1])
    return frozenset({rank})


def is_saved_whole(config: AdapterConfig, path: str) -> bool:
    """Return whether the module is, or lies in, one that PEFT saves whole.

    Classification and question answering tasks add their heads' names themselves.
    """
    if config.saves(path):
        return True
    head = head_of(path)
    added = {"SEQ_CLS": _ADDED_HEADS, "TOKEN_CLS": _ADDED_HEADS, "QUESTION_ANS": QUESTION_HEADS}
    return head is not None and head in added.get(config.task_type or "", frozenset())


def ancestors(path: str) -> Iterator[str]:
    """Yield a module path and the paths of the modules that it lies in, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
