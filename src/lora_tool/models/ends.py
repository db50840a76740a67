"""The two ends of a language model, which have a row per token: the input embedding and the output layer.

An adapter alone knows them by their names. With the base at hand they are known by their shape, as the base's config
says how many tokens there are.
"""

from __future__ import annotations

from typing import Protocol

from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.heads import head_of
from lora_tool.models.table import Architecture

INPUTS = frozenset(
    """
    embed_in embed_tokens embeddings input_embedding shared tok_embeddings token_embedding tokens_embed word_embedding
    word_embeddings wte
    """.split()  # noqa: SIM905 - a table
)
"""What input embeddings are called (`tests/contract/test_architectures.py` asks every class of transformers)."""

OUTPUTS = frozenset({"embed_out", "generator_lm_head", "lm_head", "lm_loss", "output_projection", "proj_out"})
"""What output layers are called."""

_OUTPUT_PATHS = frozenset({"decoder", "head", "output", "pred_layer.proj"})
"""Whole paths of others, whose last words are also what other modules are called."""

MATRIX = 2
"""Dimensions of a matrix; the factors of a convolution have more."""


class StoredModel(Protocol):
    """A model on disk: its config, None where that cannot be read, and its tensors by name."""

    @property
    def config(self) -> ModelConfig | None: ...
    @property
    def tensors(self) -> TensorTable: ...


def is_input(path: str) -> bool:
    """Return whether a module path is, by its name, an input embedding."""
    return path.rpartition(".")[2] in INPUTS


def is_output(path: str) -> bool:
    """Return whether a module path is, by its name, an output layer."""
    return path.rpartition(".")[2] in OUTPUTS or path in _OUTPUT_PATHS


def is_end(path: str) -> bool:
    """Return whether a module path is, by its name, one of the two ends: PEFT saves them whole after a resize."""
    return is_input(path) or is_output(path)


def is_new_module(path: str) -> bool:
    """Return whether a module path is, by its name, a head or an output layer: it is not below the base model."""
    return bool(head_of(path)) or is_output(path)


def output_name(arch: Architecture) -> str | None:
    """Return the name of the output layer's weight; None where the row has no causal LM."""
    return next((name for name in arch.causal_only if name.endswith(".weight")), None)


def embeddings(base: StoredModel, arch: Architecture) -> list[StoredTensor]:
    """Return the base's matrices with a row per token, the output layer aside."""
    vocab_size = base.config.vocab_size if base.config else None
    matrices = (tensor for tensor in base.tensors.values() if len(tensor.shape) == MATRIX)
    return [tensor for tensor in matrices if tensor.shape[0] == vocab_size and tensor.name not in arch.causal_only]


def end_names(base: StoredModel, arch: Architecture) -> frozenset[str]:
    """Return the names of all tensors that are, or may be, an end of the model: those with a row per token."""
    return frozenset({*arch.causal_only, *(tensor.name for tensor in embeddings(base, arch))})


def is_tied(base: StoredModel) -> bool:
    """Return whether the base's output layer is its input embedding, by its config and its tensors."""
    config = base.config
    classifies = any(head_of(name.rpartition(".")[0]) for name in base.tensors)
    if classifies or config is None:
        return False
    outputs = any(is_output(name.rpartition(".")[0]) for name in base.tensors)
    return config.tie_word_embeddings is True or not outputs
