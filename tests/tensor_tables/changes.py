"""Other values of a config's fields: what may change which tensors a model has, or their sizes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import transformers
from transformers import PretrainedConfig

from tests.oracle.tiny import TINY_SIZES

_COMMON = frozenset(field.name for field in dataclasses.fields(PretrainedConfig)) - {
    "tie_word_embeddings",
    "is_decoder",
    "add_cross_attention",
    "chunk_size_feed_forward",
}
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention", "conv", "mamba",
                "attention", "recurrent", "hybrid", "global", "local")  # fmt: skip


def source_of(class_name: str) -> tuple[str, ...]:
    """Return the lines of the modules of a class and its config."""
    model_class = getattr(transformers, class_name)
    sources = [inspect.getsource(sys.modules[each.__module__]) for each in (model_class, model_class.config_class)]
    return tuple("\n".join(sources).splitlines())


def words_of(name: str, lines: tuple[str, ...]) -> list[str]:
    """Return the words that stand in one line with a field: what it may say."""
    beside = [line for line in lines if re.search(rf"\b{name}\b", line)]
    found = re.findall(r"[\"']([a-z][a-z0-9_\-]{1,24})[\"']", "\n".join(beside))
    return list(dict.fromkeys(word for word in found if word != name))[:8]


def overrides(config: PretrainedConfig, lines: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield changes of one field each, in its own words, and of all biases together, which some types have so alone."""
    yield {name: not value for name, value in fields_of(config) if isinstance(value, bool) and "bias" in name}
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield {name: None}
            yield from ({name: inner} for inner in overrides(value, lines))
            continue
        yield from ({name: other} for other in others(name, value, lines))


def fields_of(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(type(config)):
        if field.name not in _COMMON and not field.name.endswith(("_token_id", "_dropout", "_range", "_eps")):
            yield field.name, vars(config).get(field.name)  # which asks no config of single layers


def others(name: str, value: object, lines: tuple[str, ...]) -> Iterator[Any]:
    """Yield other values of a field."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from dict.fromkeys(
            (value * 2, value * 4, value // 2 or 3, 0) if value else (1, 2, 8)
        )  # so that heads divide sizes
    elif isinstance(value, float):
        yield value * 2 or 0.5
    elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        yield from ([kind] * len(value) for kind in (*_LAYER_TYPES, *set(value)))
        yield value[::-1]
    elif isinstance(value, str | None):
        yield from words_of(name, lines) if "act" not in name else ("gelu", "silu")
        if value is None:
            yield from (True, 8, 2, 8.0)


def companions(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield what a change may need beside it: a size for every field that has none, or more layers."""
    needed = {
        name: TINY_SIZES.get(name, 2) for name, value in fields_of(config) if value is None and takes_int(config, name)
    }
    if needed:
        yield needed
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield from ({name: inner} for inner in companions(value))
    yield from longer(config)


def takes_int(config: PretrainedConfig, name: str) -> bool:
    kinds = {field.name: str(field.type) for field in dataclasses.fields(type(config))}
    return re.search(r"\bint\b", kinds[name]) is not None


def rebalanced(config: PretrainedConfig) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield changes of two sizes of one config at once, whose product or quotient must stay, each with the first's path."""
    sizes = {name: value for name, value in fields_of(config) if type(value) is int and value}
    for name, other in itertools.permutations(sizes, 2):
        for factor in (2, 4):
            yield (name,), {name: sizes[name] * factor, other: sizes[other] * factor}
            if sizes[other] % factor == 0:
                yield (name,), {name: sizes[name] * factor, other: sizes[other] // factor}
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield from (((name, *path), {name: inner}) for path, inner in rebalanced(value))


def longer(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield changes of a number of layers with the lists that have an entry per layer."""
    lists = {n: v for n, v in fields_of(config) if isinstance(v, list)}
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield from ({name: inner} for inner in longer(value))
        elif isinstance(value, int) and "layer" in name and not isinstance(value, bool):
            same = {n: v * 2 for n, v in lists.items() if len(v) == value or n == "attention_types"}
            yield {name: value * 2, **same}


def merged(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for name, value in two.items():
        both[name] = (
            merged(both[name], value) if isinstance(value, dict) and isinstance(both.get(name), dict) else value
        )
    return both


def all_of(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the changes as one; the last has the last word."""
    found: dict[str, Any] = {}
    for change in changes:
        found = merged(found, change)
    return found


def changed(change: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if name not in pinned or pinned[name] != value}
