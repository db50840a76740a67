"""The two ends of a language model, which have a row per token: the input embedding and the output layer.

An adapter alone knows them by their names. With the base at hand they are known by their shape, as the base's config
says how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct

from lora_tool.core.keys import split_layer
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.stored import same_values
from lora_tool.models.table import ARCHITECTURES, Architecture

# What heads are called: the layers of a classifier or a reward model that a language model does not have.


_OF_ROWS = frozenset(row.head for row in ARCHITECTURES.values() if row.head)

CLASSIFICATION_HEADS = frozenset(head for head in _OF_ROWS if "." not in head) | {"logits_proj"}
"""The heads of classifiers whose rows are the labels, where they are modules of the model itself."""

PEFT_CLASSIFIERS = frozenset({"score", "classifier"})
"""Those that PEFT looks for, and vLLM takes."""

QUESTION_HEADS = frozenset({"qa_outputs"})

VALUE_HEADS = frozenset({"v_head", "value_head", "reward_head", "regression_head"})
"""The heads of PPO's value models and of other trainers' reward models."""

HEADS = CLASSIFICATION_HEADS | QUESTION_HEADS | VALUE_HEADS

NEW_MODULES = HEADS | {head.rpartition(".")[2] for head in _OF_ROWS}
"""Components of the paths of modules that a base language model does not have: new and random when training begins."""

ADDED_BY_PEFT: Mapping[str, frozenset[str]] = MappingProxyType(
    {"SEQ_CLS": PEFT_CLASSIFIERS, "TOKEN_CLS": PEFT_CLASSIFIERS, "QUESTION_ANS": QUESTION_HEADS}
)
"""`task_type` → the heads that PEFT saves whole without being asked (peft 0.21, `peft_model.py`)."""

CLASSIFICATION_TASKS = frozenset({"SEQ_CLS", "TOKEN_CLS"})

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the names of classes end that write text, and have no head with labels."""

LAST_LAYERS = ("", ".out_proj", ".summary", ".linear_out")
"""Where in a head its last layer is, whose rows are the labels: RoBERTa's and BART's is `out_proj`, XLM's `summary`."""


def head_of(path: str, names: frozenset[str] = HEADS) -> str | None:
    """Return the head that a path is or lies in: ``classifier`` of ``classifier.out_proj``; None if it is in no head.

    A head is in no numbered layer: the ``classifier`` of a router of experts is none.
    """
    for part in path.split("."):
        if part in names:
            return part
        if part.isdecimal():
            return None
    return None


def head_path(path: str, names: frozenset[str] = HEADS) -> str:
    """Return the path of the head that a path is or lies in: ``classifier`` of ``classifier.dense``; else the path."""
    head = head_of(path, names)
    if head is None:
        return path
    return f"{f'.{path}.'.partition(f'.{head}.')[0]}.{head}".removeprefix(".")


def last_weights(head: str) -> tuple[str, ...]:
    """Return the names that the weight of the head's last layer may have, the likeliest first."""
    return tuple(f"{head}{last}.weight" for last in LAST_LAYERS)


_LAST_WEIGHTS = frozenset(name for head in CLASSIFICATION_HEADS for name in last_weights(head))


def is_last_layer(module: str) -> bool:
    """Return whether a module path is that of a head's last layer, which has one row per label."""
    return f"{module}.weight" in _LAST_WEIGHTS


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
    """Return the base's matrices with a row per token, the output layer aside, and those of layers if there are others:
    a layer may have as many rows by chance.
    """
    vocab_size = base.config.vocab_size if base.config else None
    found = [
        tensor
        for tensor in base.tensors.values()
        if len(tensor.shape) == MATRIX and tensor.shape[0] == vocab_size and tensor.name not in arch.causal_only
    ]
    return [tensor for tensor in found if split_layer(tensor.name)[0] is None] or found


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


# Another number of tokens than the base's, which an adapter brings that was trained after `resize_token_embeddings`.


_INPUT, _SHARED = ".embed_tokens.weight", "shared.weight"


class Vocabulary(Struct, frozen=True, kw_only=True):
    """Another number of tokens than the base's: `size` rows for each of the tensors `names`."""

    size: int
    names: frozenset[str]
    brought: frozenset[str]
    """Those that the adapter holds with so many rows."""
    kept: frozenset[str]
    """Ends that would stay as they are, though transformers resizes or ties them with the others."""

    def lacking(self, base: StoredModel, without: Collection[str]) -> Iterator[str]:
        """Yield the ends whose new rows are nowhere: random when the adapter was trained, and not saved.

        Fewer rows are the base's first ones. `without` are ends that the merged model has not, or ties to others.
        """
        yield from sorted(self.kept.difference(without))
        for name in sorted(self.names.difference(self.brought, without)):
            if name in base.tensors and base.tensors[name].shape[0] < self.size:
                yield name


def other_vocabulary(base: StoredModel, arch: Architecture, whole: Mapping[str, StoredTensor]) -> Vocabulary | None:
    """Return the vocabulary that an adapter brings along which was trained after `resize_token_embeddings`.

    None where its embeddings have as many rows as the base's; the rules saw that all have the same. `whole` are the
    adapter's whole tensors by the base's names.
    """
    vocab_size = base.config.vocab_size if base.config else None
    rows: dict[str, int] = {}
    for name, tensor in whole.items():
        home = base.tensors.get(name)
        same = home is not None and home.shape[1:] == tensor.shape[1:] and home.shape[:1] == (vocab_size,)
        tied_output = home is None and name == output_name(arch) and len(tensor.shape) == MATRIX
        if (same or tied_output) and tensor.shape[0] != vocab_size:
            rows[name] = tensor.shape[0]
    if not rows:
        return None
    size = next(iter(rows.values()))
    ends = {tensor.name for tensor in embeddings(base, arch)}
    # of BART's and BERT's kin, where the config does not tie them
    others = {name for name in ends if name.endswith(_INPUT)} if any(map(_is_input, rows)) else set()
    others |= {name.replace(".decoder.bias", ".bias") for name in rows} & base.tensors.keys()
    if rows.keys() & ends:
        ends &= rows.keys()  # a matrix with as many rows by chance is no embedding
    sized = {
        name for name in arch.causal_only if name in base.tensors and base.tensors[name].shape[:1] == (vocab_size,)
    }
    return Vocabulary(
        size=size,
        names=frozenset(ends | sized | rows.keys()),
        brought=frozenset(name for name, tensor in whole.items() if tensor.shape[:1] == (size,)),
        kept=frozenset(others - rows.keys()),
    )


def _is_input(name: str) -> bool:
    return name.endswith((_INPUT, _SHARED))


def stored_twice(base: StoredModel, arch: Architecture) -> dict[str, str]:
    """Return output tensor → the tensor of which a plainly stored base holds it as a tied copy. Reads the two ends.

    transformers ties them where the config does not say otherwise and the values are the same (5.23,
    `PreTrainedModel.tie_weights`).
    """
    if base.config is None or base.config.tie_word_embeddings is False:
        return {}
    copies = {}
    for name in arch.causal_only:
        copy = base.tensors.get(name)
        if copy is None:
            continue
        # `X.decoder.bias` of BERT's kin is tied to `X.bias`, the matrix to the embedding
        sibling = base.tensors.get(f"{name.removesuffix('.decoder.bias')}.bias")
        others = [t for t in base.tensors.values() if len(t.shape) == MATRIX and t.name not in arch.causal_only]
        candidates = [sibling] if sibling is not None and sibling is not copy else others
        source = next((other for other in candidates if same_values(copy, other)), None)
        if source is not None:
            copies[name] = source.name
    return copies
