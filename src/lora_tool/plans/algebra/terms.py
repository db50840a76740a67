"""The modules of a weighted sum of adapters: for each the factors of its ΔW, as matrices, from all of the adapters."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.tensors import StoredTensor
from lora_tool.plans.core.factor_ops import as_matrix


class Term(Struct, frozen=True, kw_only=True, eq=False):
    """One adapter's share: `scale` · B·A, with B of [out, r], A of [r, in], and what LoRA adds to the bias."""

    a: StoredTensor
    b: StoredTensor
    scale: float
    """The adapter's weight in the sum times the module's scaling."""
    bias: StoredTensor | None = None

    @property
    def rank(self) -> int:
        """Rows of A, columns of B."""
        return self.a.shape[0]


class Factors(Struct, frozen=True, kw_only=True, eq=False):
    """ΔW = Σ scale·B·A of one module."""

    module: str
    terms: tuple[Term, ...]
    embedding: bool
    inner: tuple[int, ...]
    """The shape of a row of A as it is stored: that of a convolution has more than one dimension."""
    outer: tuple[int, ...]
    """What follows rank in the shape of B: ones, of a convolution."""

    @property
    def rank(self) -> int:
        """The ranks together: that of the sum without any loss."""
        return sum(term.rank for term in self.terms)

    @property
    def a_parts(self) -> tuple[StoredTensor, ...]:
        """All A's, one below the other."""
        return tuple(term.a for term in self.terms)

    @property
    def b_parts(self) -> tuple[StoredTensor, ...]:
        """All B's, side by side."""
        return tuple(term.b for term in self.terms)

    @property
    def out(self) -> int:
        """Rows of ΔW."""
        return self.b_parts[0].shape[0]

    @property
    def width(self) -> int:
        """Columns of ΔW."""
        return self.a_parts[0].shape[1]


def factors_of_sum(views: Sequence[AdapterView], weights: Sequence[float]) -> tuple[Factors, ...]:
    """Return the change that Σ weight·adapter makes to each module, in the order in which the adapters name them.

    Raises `UnsupportedAdapter` for a layer whose factors are not two matrices, `IncompatibleBase` where a module has
    different sizes in two adapters.
    """
    found: dict[str, list[tuple[LoraLayer, Term]]] = {}
    for view, weight in zip(views, weights, strict=True):
        names = {layer.adapter_name for layer in view.layers}
        if len(names) > 1:
            raise UnsupportedAdapter(
                f"{view.adapter.root}: holds several adapters in one file: {', '.join(sorted(map(str, names)))}",
                hint=_what_is_wrong(view.adapter.root),
            )
        for layer in view.layers:
            found.setdefault(layer.module, []).append((layer, _term(layer, weight)))
    return tuple(_factors(module, own) for module, own in found.items())


def common_scale(sums: Sequence[Factors]) -> float:
    """Return the scaling that all modules have, which a config can say for all; 1 where they have several."""
    scales = {term.scale for each in sums for term in each.terms}
    return (scales.pop() or 1.0) if len(scales) == 1 else 1.0


def unscaled(factors: Factors, scale: float) -> Factors:
    """Return the module without the scaling that the config says."""
    return replace(factors, terms=tuple(replace(term, scale=term.scale / scale) for term in factors.terms))


def alpha_for(scale: float, rank: int) -> int | None:
    """Return the whole `lora_alpha` that with this rank is exactly the scaling, alpha / r; None where there is none."""
    alpha = scale * rank
    return int(alpha) if rank and alpha.is_integer() and alpha / rank == scale else None


def _term(layer: LoraLayer, weight: float) -> Term:
    a, b = layer.a, layer.b
    named = layer.any_tensor
    if a is None or b is None or layer.scaling is None or layer.rank is None or layer.strays:
        raise UnsupportedAdapter(
            f"{named.path}: `{layer.module}` is not a pair of lora_A and lora_B", hint=_what_is_wrong(named.path.parent)
        )
    if b.shape[1] != a.shape[0]:
        raise UnsupportedAdapter(
            f"{named.path}: `{layer.module}` is a grouped convolution, whose B belongs to A group by group",
            hint=f"merge the adapter instead: lora-tool merge --allow-in-memory {shlex.quote(str(named.path.parent))}",
        )
    if not (a.dtype.is_float and b.dtype.is_float):
        raise UnsupportedAdapter(
            f"{named.path}: factors of {a.dtype} and {b.dtype} cannot be computed with: expected F16, BF16, F32 or F64"
        )
    return Term(a=as_matrix(a), b=as_matrix(b), scale=weight * layer.scaling, bias=layer.bias)


def _what_is_wrong(folder: Path) -> str:
    return f"lora-tool validate {shlex.quote(str(folder))} says what is wrong with it"


def _factors(module: str, own: Sequence[tuple[LoraLayer, Term]]) -> Factors:
    layers, terms = [layer for layer, _ in own], tuple(term for _, term in own)
    first = layers[0].pair
    if first is None:
        raise AssertionError("a term has two factors")
    inner, outer = first[0].shape[1:], first[1].shape[2:]
    for layer, term in zip(layers, terms, strict=True):
        pair = layer.pair
        sizes = (pair[1].shape[0], pair[0].shape[1:], layer.embedding) if pair else None
        if sizes != (terms[0].b.shape[0], inner, layers[0].embedding):
            raise IncompatibleBase(
                f"`{module}` is [{term.b.shape[0]}, {term.a.shape[1]}] in {term.a.path.parent}, "
                f"[{terms[0].b.shape[0]}, {terms[0].a.shape[1]}] in {terms[0].a.path.parent}: the two adapters have different bases",
                hint="combine adapters that were trained on the same model",
            )
    return Factors(module=module, terms=terms, embedding=layers[0].embedding, inner=inner, outer=outer)


def biases(terms: Sequence[Term]) -> Mapping[int, StoredTensor]:
    """Return the biases that the terms have, by their place, each as a matrix of one column."""
    return {at: as_matrix(term.bias) for at, term in enumerate(terms) if term.bias is not None}
