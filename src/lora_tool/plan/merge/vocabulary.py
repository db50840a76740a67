"""Another number of tokens than the base's, which an adapter brings that was trained after `resize_token_embeddings`.

PEFT saves the ends of the model by itself then, with more or fewer rows than the base has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lora_tool.adapter.view import MATRIX
from lora_tool.architectures import Architecture
from lora_tool.architectures.ends import embeddings, output_name
from lora_tool.checkpoint import ModelDir
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.tensors import StoredTensor

_INPUT, _SHARED = ".embed_tokens.weight", "shared.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Another number of tokens than the base's: `size` rows for each of the tensors `names`."""

    size: int
    names: frozenset[str]


def other_vocabulary(base: ModelDir, arch: Architecture, modules: AdapterModules) -> Vocabulary | None:
    """Return the vocabulary that an adapter brings along which was trained after `resize_token_embeddings`.

    None where its embeddings have as many rows as the base's; the rules saw that all have the same. Raises
    `UnsupportedAdapter` where an end has none.
    """
    vocab_size = base.config.vocab_size if base.config else None
    rows: dict[str, int] = {}
    for name, tensor in _whole(modules):
        home = base.tensors.get(name)
        same = home is not None and home.shape[1:] == tensor.shape[1:] and home.shape[0] == vocab_size
        tied_output = home is None and name == output_name(arch) and len(tensor.shape) == MATRIX
        if (same or tied_output) and tensor.shape[0] != vocab_size:
            rows[name] = tensor.shape[0]
    if not rows:
        return None
    ends = {tensor.name for tensor in embeddings(base, arch)}
    _require_no_other_end(base, ends, rows)
    if rows.keys() & ends:
        ends &= rows.keys()  # a matrix with as many rows by chance is no embedding
    sized = {
        name for name in arch.causal_only if name in base.tensors and base.tensors[name].shape[:1] == (vocab_size,)
    }
    return Vocabulary(size=next(iter(rows.values())), names=frozenset(ends | sized | rows.keys()))


def _require_no_other_end(base: ModelDir, ends: set[str], rows: Mapping[str, int]) -> None:
    """Return unless an embedding or an output bias stays as it was, which transformers resizes or ties with the others.

    It does so to those of BART's and BERT's kin that their config does not tie.
    """
    others = {name for name in ends if name.endswith(_INPUT)} if any(map(_is_input, rows)) else set()
    others |= {name.replace(".decoder.bias", ".bias") for name in rows} & base.tensors.keys()
    left = sorted(others - rows.keys())
    if left:
        raise UnsupportedAdapter(
            f"{base.root}: the adapter has another number of tokens for {', '.join(sorted(rows))}, and nothing for "
            f"`{left[0]}`",
            hint="give the base with its embeddings resized as they were for the training",
        )


def _is_input(name: str) -> bool:
    return name.endswith((_INPUT, _SHARED))


def _whole(modules: AdapterModules) -> Iterator[tuple[str, StoredTensor]]:
    yield from modules.saved.items()
    yield from modules.frozen_base.items()


def with_vocabulary(
    base: ModelDir, vocabulary: Vocabulary, modules: AdapterModules, dropped: frozenset[str]
) -> ModelDir:
    """Return the base as `resize_token_embeddings` would make it, as far as the adapter does not bring the rows itself.

    Fewer rows are the first ones. Raises `IncompatibleBase` for more: the new rows of an end that the adapter does not
    hold were random when it was trained, and are lost.
    """
    brought = {name for name, tensor in _whole(modules) if tensor.shape[:1] == (vocabulary.size,)}
    tensors = dict(base.tensors)
    for name in vocabulary.names - brought - dropped:
        tensor = tensors[name]
        if tensor.shape[0] < vocabulary.size:
            raise IncompatibleBase(
                f"the adapter was trained with {vocabulary.size} tokens, `{name}` of {base.root} has {tensor.shape[0]}: "
                "its new rows were random, and are not in the adapter",
                hint='save it again with them: modules_to_save=["embed_tokens", "lm_head"], or give the resized base',
            )
        tensors[name] = first_rows(tensor, vocabulary.size)
    return replace(base, weights=replace(base.weights, tensors=tensors))


def first_rows(tensor: StoredTensor, count: int) -> StoredTensor:
    """Return the first `count` rows of the tensor, of the same bytes on disk."""
    spec = replace(tensor.spec, shape=(count, *tensor.shape[1:]))
    return StoredTensor(spec=spec, spans=tuple(tensor.part(0, spec.nbytes)))
