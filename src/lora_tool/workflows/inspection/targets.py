"""The modules of an adapter, and its targets: rows of modules that differ in nothing but their layer and their values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

from lora_tool.adapters.view import LoraLayer
from lora_tool.core.keys import split_layer
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.workflows.inspection.model import Measured, Module, Norms, Target, ValueSpread

if TYPE_CHECKING:
    from lora_tool.workflows.inspection.spectra import Spectrum


# What modules are called, and in what order they stand, in tables and pictures.


_ORDER = (
    ("wte", "embed_tokens", "word_embeddings", "embeddings"),
    ("qkv_proj", "query_key_value", "qkv", "Wqkv", "c_attn", "in_proj", "att_proj"),
    ("q_proj", "query", "q", "wq", "q_lin", "to_q"),
    ("q_a_proj",),
    ("q_b_proj",),
    ("kv_a_proj_with_mqa",),
    ("kv_b_proj",),
    ("k_proj", "key", "k", "wk", "k_lin", "to_k"),
    ("v_proj", "value", "v", "wv", "v_lin", "to_v"),
    ("o_proj", "out_proj", "dense", "o", "wo", "out_lin", "attn_out", "to_out", "attn.c_proj"),
    ("gate_up_proj",),
    ("gate_proj", "w1", "wi_0"),
    ("up_proj", "w3", "wi_1", "wi", "fc1", "fc_in", "c_fc", "lin1", "dense_h_to_4h"),
    ("down_proj", "w2", "fc2", "fc_out", "lin2", "dense_4h_to_h", "mlp.c_proj"),
)
"""Modules as a layer computes them, each place with the names that architectures give it."""
_PLACES = {name: place for place, names in enumerate(_ORDER) for name in names}


def place(target: str) -> int:
    """Return what sorts targets as a layer computes them: q, k, v, o, gate, up, down; those of other names come last.

    A `target` is a path or its end, perhaps with a parameter's name, and with anything in brackets behind it.
    """
    parts = target.partition(" ")[0].removesuffix(".weight").removesuffix(".bias").split(".")
    ends = (".".join(parts[at:]) for at in range(max(len(parts) - 2, 0), len(parts)))
    return min((_PLACES[end] for end in ends if end in _PLACES), default=len(_ORDER))


def short_names(paths: Iterable[str]) -> Mapping[str, str]:
    """Return for each dotted path its shortest suffix that no other path ends with, keeping what a `*` numbers."""
    listed = set(paths)
    endings = Counter(suffix for path in listed for suffix in _suffixes(path))
    return {path: next((suffix for suffix in _suffixes(path) if endings[suffix] == 1), path) for path in listed}


def _suffixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    # `experts.*.gate_proj` says more than `gate_proj`: begin before the last number that is not the layer's
    stars = [at for at, part in enumerate(parts) if part == "*"]
    begin = min(stars[-1] - 1, len(parts) - 1) if len(stars) > 1 else len(parts) - 1
    yield from (".".join(parts[at:]) for at in range(max(begin, 0), -1, -1))


_Measured: TypeAlias = tuple[LoraLayer, Measured | None]


def targets_and_modules(
    layers: Sequence[LoraLayer], config: AdapterConfig | None, *, norms: bool, spectra: bool
) -> tuple[tuple[Target, ...], tuple[Module, ...]]:
    """Return the targets, and the modules in their order: with `norms` those of A, B and ΔW, with `spectra` singular values.

    Raises `OSError` where weights cannot be read.
    """
    measured: Sequence[Measured | None] = ()
    if norms:
        from lora_tool.workflows.inspection.factors import layer_norms  # numpy, only for norms

        measured = layer_norms(layers)
    found = _spectra(layers) if spectra else {}
    rows = [(name, group) for name, groups in _grouped(layers, measured).items() for group in groups]
    return (
        tuple(_target(name, group, config) for name, group in rows),
        tuple(_module(name, layer, held, config, found.get(layer)) for name, group in rows for layer, held in group),
    )


def _grouped(layers: Sequence[LoraLayer], measured: Sequence[Measured | None]) -> Mapping[str, list[list[_Measured]]]:
    """Return the layers by the name of their row: path without its numbers, and by all that a row has in common."""
    groups: dict[tuple[object, ...], list[_Measured]] = defaultdict(list)
    for layer, norms in zip_longest(layers, measured):
        shapes = layer.a and layer.a.shape, layer.b and layer.b.shape
        path = split_layer(layer.module)[1]
        groups[path, layer.adapter_name, layer.rank, layer.scaling, shapes, _dtype(layer)].append((layer, norms))
    labels = short_names({str(key[0]) for key in groups})
    named: dict[str, list[list[_Measured]]] = defaultdict(list)
    for key, group in groups.items():
        named[labels[str(key[0])] + (f" ({key[1]})" if key[1] else "")].append(group)
    return named


def _dtype(layer: LoraLayer) -> str:
    return "/".join(dict.fromkeys(str(factor.dtype) for factor in layer.factors))


def _target(name: str, group: Sequence[_Measured], config: AdapterConfig | None) -> Target:
    first, members = group[0][0], [layer for layer, _ in group]
    numbers = {number for member in members if (number := split_layer(member.module)[0]) is not None}
    return Target(
        name=name,
        modules=tuple(member.module for member in members),
        layers=tuple(sorted(numbers)),
        rank=first.rank,
        alpha=_alpha(first, config),
        scaling=first.scaling,
        a_shape=first.a.shape if first.a else None,
        b_shape=first.b.shape if first.b else None,
        dtype=_dtype(first),
        parameters=sum(factor.spec.numel for member in members for factor in member.factors),
        norms=_norms([norms for _, norms in group if norms is not None]),
    )


def _alpha(layer: LoraLayer, config: AdapterConfig | None) -> float | None:
    return config.alpha(layer.path) if config else None


def _spectra(layers: Sequence[LoraLayer]) -> Mapping[LoraLayer, Spectrum | None]:
    """Return the spectrum of each layer, None where its factors do not fit together."""
    from threadpoolctl import threadpool_limits  # numpy, only when requested

    from lora_tool.workflows.inspection.spectra import spectrum

    with threadpool_limits(limits=1, user_api="blas"):  # factors are small: threads would only wait for each other
        return {layer: spectrum(layer) for layer in layers}


def _module(
    target: str, layer: LoraLayer, norms: Measured | None, config: AdapterConfig | None, found: Spectrum | None
) -> Module:
    norm_a, norm_b, norm_delta = norms or (None, None, None)
    return Module(
        module=layer.module,
        target=target,
        layer=split_layer(layer.module)[0],
        rank=layer.rank,
        alpha=_alpha(layer, config),
        scaling=layer.scaling,
        norm_a=norm_a,
        norm_b=norm_b,
        norm_delta=norm_delta,
        effective_rank=found.effective_rank if found else None,
        singular_values=found.singular_values if found else (),
    )


def _norms(values: list[Measured]) -> Norms | None:
    if not values:
        return None
    deltas = [delta for _, _, delta in values if delta is not None]
    return Norms(
        a=spread([a for a, _, _ in values]),
        b=spread([b for _, b, _ in values]),
        delta=spread(deltas) if deltas else None,
    )


def spread(values: list[float]) -> ValueSpread:
    """Return least, median and most of at least one value; NaN counts as larger than everything."""
    ordered = sorted(values, key=lambda value: (value != value, value))  # noqa: PLR0124 - NaN is not itself
    middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return ValueSpread(least=ordered[0], median=sum(middle) / 2, most=ordered[-1])
