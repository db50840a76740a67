"""Heads whose rows are sums of rows of other layers: of an output layer's tokens, or of the labels of other heads."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct, field

from lora_tool.adapters.support import refusals_of_config
from lora_tool.adapters.targeting import saved_as_one
from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.core.display import named
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.keys import split_layer
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.adapter_config import INITS_RECOMPUTED
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.stored import same_values
from lora_tool.models import architecture_of
from lora_tool.models.ends import CLASSIFICATION_HEADS, MATRIX, head_of, is_input, is_output
from lora_tool.plans.core.factor_ops import Mix, SmallMatrix
from lora_tool.plans.core.operation import LoraTerm, rows_of


class Layer(Struct, frozen=True, kw_only=True):
    """A linear layer as it acts in a model: W, some rows of it replaced, and LoRA on it."""

    module: str
    weight: StoredTensor
    replaced: Mapping[int, StoredTensor] = field(default_factory=dict)
    """Row of W → the row that a trained token has instead."""
    lora: LoraTerm | None = None
    bias: StoredTensor | None = None

    def row(self, number: int) -> Iterator[tuple[StoredTensor, Sequence[float]]]:
        """Yield matrices, and what each of their rows is multiplied with, whose sum is the row of W + s·B·A."""
        yield self.replaced.get(number) or rows_of(self.weight, number, 1), (1.0,)
        if self.lora is not None:
            from lora_tool.formats.stored_numbers import numbers  # numpy, only where values are read

            yield self.lora.a, (self.lora.scaling * numbers(rows_of(self.lora.b, number, 1))[0]).tolist()


class RowShare(Struct, frozen=True, kw_only=True):
    """The share that one row of a layer has in a row of a new head."""

    layer: Layer
    row: int
    coefficient: float


def head_of_rows(rows: Sequence[Sequence[RowShare]]) -> Mix:
    """Return the operation that makes a head, each of whose rows is the sum of its shares. Reads rows of lora_B."""
    found: dict[StoredTensor, list[list[float]]] = {}
    for at, shares in enumerate(rows):
        for share in shares:
            for tensor, factors in share.layer.row(share.row):
                table = found.setdefault(tensor, [[0.0] * len(rows) for _ in factors])
                for own, factor in zip(table, factors, strict=True):
                    own[at] += share.coefficient * factor
    return Mix(parts=tuple(found), matrix=SmallMatrix.of([*chain.from_iterable(found.values())]), below=True)


def exact_type(head: Mix, dtype: DType) -> DType:
    """Return `dtype` if it holds every value of the head, else float32. Reads the head's inputs.

    Raises `UnsupportedAdapter` for a head of zeros, which scores every text alike.
    """
    from lora_tool.formats.stored_numbers import numbers, rounded  # numpy, only where values are read

    values = head.reference(numbers)
    if not values.any(axis=1).all():
        raise UnsupportedAdapter(
            f"{head.source.path}: the rows of `{head.source.name}` are equal: every score would be 0",
            hint="choose tokens that the model was trained to answer with",
        )
    return dtype if bool((rounded(values, dtype) == values).all()) else DType.F32


# The layers that a head is made of: the output layer of a language model, and the head of a classifier.


def output_layer(base: ModelDir, view: AdapterView | None) -> Layer:
    """Return the output layer of a language model, with what the adapter of `view` does to it.

    Of tied ends PEFT applies LoRA to the one that has it, and trained tokens to both. Raises `IncompatibleBase` for a
    model without an output layer, `UnsupportedAdapter` for LoRA whose rows are not W + s·B·A.
    """
    stored, embedding = _end(base, is_output), _end(base, is_input)
    if embedding is None or (stored is None and not _ties(base)):
        lacking = "input embedding" if embedding is None else "output layer"
        raise IncompatibleBase(
            f"{base.root}: no {lacking} found, so lora-tool cannot tell what scores its tokens",
            hint=f"lora-tool validate {shlex.quote(str(base.root))}",
        )
    weight = embedding if stored is None else stored
    if view is None:
        return _checked(Layer(module=_path(weight.name), weight=weight, bias=_bias(base.tensors)))
    output, first = _changed(view, is_output) or "lm_head", _changed(view, is_input)
    tied = stored is None or (first is not None and _is_copy(base, stored, embedding))
    held = view.saved.get(f"{output}.weight") or view.frozen.get(f"{output}.weight")
    tokens = view.tokens.get(output)
    if tied and first is not None:
        apart = view.config.saves(first) and not saved_as_one(view.config, output, held=False)
        held = held or (None if apart else view.saved.get(f"{first}.weight")) or view.frozen.get(f"{first}.weight")
        tokens = tokens or view.tokens.get(first)
    replaced = {} if tokens is None else {row: rows_of(tokens.rows, at, 1) for at, row in enumerate(tokens.indices)}
    bias = _bias(view.saved) or _bias(base.tensors)
    return _checked(
        Layer(module=output, weight=held or weight, replaced=replaced, lora=_lora(base, view, output), bias=bias)
    )


def score_layer(base: ModelDir, view: AdapterView | None) -> Layer:
    """Return the head of a classifier, the adapter's where it has one.

    Raises `IncompatibleBase` where neither has a head, `UnsupportedAdapter` for one of several layers or with a bias.
    """
    tables = (base.tensors,) if view is None else (view.saved, view.frozen, base.tensors)
    held = next((found for table in tables if (found := [*filter(is_of_head, table)])), [])
    if not held:
        raise IncompatibleBase(
            f"{base.root}: no head of a classifier found", hint=f"lora-tool validate {shlex.quote(str(base.root))}"
        )
    if len(held) > 1:
        raise UnsupportedAdapter(
            f"{base.root}: its head is {named(held)}, not one matrix with a row for each label, so its labels cannot be "
            "chosen or subtracted exactly",
            hint="subtract the scores of the labels where they are used",
        )
    weight = next(table[held[0]] for table in tables if held[0] in table)
    module = _path(held[0])
    return _checked(Layer(module=module, weight=weight, lora=None if view is None else _lora(base, view, module)))


def is_of_head(name: str) -> bool:
    """Return whether a tensor's name in a model is that of a classifier's head."""
    return head_of(_path(name), CLASSIFICATION_HEADS) is not None


def is_of_output(name: str) -> bool:
    """Return whether a tensor's name in a model is that of an output layer."""
    return is_output(_path(name))


def _path(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _end(base: ModelDir, is_one: Callable[[str], bool]) -> StoredTensor | None:
    """Return the matrix of a model's end; None where there is none, or none that has one row for each token."""
    found = [
        tensor
        for name, tensor in base.tensors.items()
        if is_one(name.removesuffix(".weight")) and len(tensor.shape) == MATRIX and split_layer(name)[0] is None
    ]
    of_tokens = [tensor for tensor in found if tensor.shape[0] == base.whole_config.vocab_size] or found
    return of_tokens[0] if len(of_tokens) == 1 else None


def _changed(view: AdapterView, is_one: Callable[[str], bool]) -> str | None:
    """Return the path of the end that the adapter holds something of."""
    paths = (*map(_path, (*view.saved, *view.frozen)), *view.tokens, *(layer.target for layer in view.layers))
    return next(filter(is_one, paths), None)


def _ties(base: ModelDir) -> bool:
    """Return whether a model without an output layer on disk has its embedding for one.

    The rules know the classes in the table of architectures; of the others only Gemma 3 ties by default.
    """
    config = base.whole_config
    row = architecture_of(config.model_type or "")
    by_default = config.model_type == "gemma3" or (row is not None and row.causal_lm is not None)
    return by_default if config.tie_word_embeddings is None else config.tie_word_embeddings


def _is_copy(base: ModelDir, output: StoredTensor, embedding: StoredTensor) -> bool:
    return base.whole_config.tie_word_embeddings is not False and same_values(output, embedding)


def _bias(tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    return next((each for name, each in tensors.items() if name.endswith(".bias") and is_of_output(name)), None)


def merge_first(base: ModelDir, view: AdapterView) -> str:
    """Return the hint for an adapter that has no such form: the merged model has."""
    hint = f"merge it, and convert the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}"
    return hint if _end(base, is_output) else f"{hint} --untie"


def _lora(base: ModelDir, view: AdapterView, module: str) -> LoraTerm | None:
    """Return the LoRA on a module, None without any. Raises `UnsupportedAdapter` where its rows are not W + s·B·A."""
    layer = next((layer for layer in view.layers if layer.module == module), None)
    if layer is None:
        return None
    refused = next(refusals_of_config(view), None)
    why = None if refused is None else refused.text
    if view.config.init_lora_weights in INITS_RECOMPUTED:
        why = f"`init_lora_weights` {view.config.init_lora_weights}, which changes W"
    elif layer.magnitude is not None:
        why = "DoRA"
    elif layer.bias is not None:
        why = "`lora_bias`"
    elif layer.pair is None or layer.strays or layer.embedding:
        why = f"{', '.join(sorted(part.name for part in layer.parts.values()))}, not a pair of lora_A and lora_B"
    if why is not None or layer.pair is None:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: `{module}` has {why}, so its rows are not W + s·B·A",
            hint=merge_first(base, view),
        )
    a, b = layer.pair
    return LoraTerm(a=a, b=b, scaling=layer.scaling or 0.0)


def _checked(layer: Layer) -> Layer:
    """Return the layer. Raises `UnsupportedAdapter` where its rows are not numbers as they are stored."""
    weight = layer.weight
    if not weight.dtype.is_float or encoding_of(weight) is not None or len(weight.shape) != MATRIX:
        raise UnsupportedAdapter(
            f"{weight.path}: `{weight.name}` is {weight.dtype} {list(weight.shape)}, expected a matrix of floats: the rows of "
            "a quantised layer cannot be subtracted exactly",
            hint="give the model in 16 bits, with its own config: `base=MODEL`",
        )
    return layer
