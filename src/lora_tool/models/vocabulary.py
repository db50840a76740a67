"""Another number of tokens than the base's, which an adapter brings that was trained after `resize_token_embeddings`.

PEFT saves the ends of the model by itself then, with more or fewer rows than the base has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import MATRIX, StoredModel, embeddings, output_name
from lora_tool.models.table import Architecture

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
