"""Writes `config_fields.jsonl`: what each class of transformers' configs takes for each of its fields.

python -m tests.tensor_tables.config_fields
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lora_tool.architectures.config_fields import ANY, TABLE

_SIMPLE: Mapping[Any, str] = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null", None: "null"}


def table() -> str:
    """Return what the file should hold, by the transformers that is installed."""
    rows = [_row(name, config) for name, config in CONFIG_MAPPING.items()]
    return "".join(
        f"{json.dumps(row, separators=(',', ':'))}\n" for row in sorted(rows, key=lambda row: row["model_type"])
    )


def _row(model_type: str, config: type[PreTrainedConfig]) -> dict[str, Any]:
    taken: dict[str, list[str]] = {}
    for field in dataclasses.fields(config):
        kinds = "|".join(sorted(set(_kinds(field.type))))
        if kinds and ANY not in kinds.split("|"):
            taken.setdefault(kinds, []).append(field.name)
    row: dict[str, Any] = {
        "model_type": model_type,
        "fields": {kinds: " ".join(sorted(names)) for kinds, names in sorted(taken.items())},
    }
    inner = {name: _inner(spec) for name, spec in config.sub_configs_defaults.items()}
    layered = config.validate_layer_type is PreTrainedConfig.validate_layer_type
    further = {"inner": inner, "depth": _depth(config), "own_layers": not layered}
    return row | {name: value for name, value in further.items() if value}


def _depth(config: type[PreTrainedConfig]) -> list[str | int] | None:
    """Return what the class calls its number of layers, and how many it has without a word."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    field = next((field for field in dataclasses.fields(config) if field.name == name), None)
    return None if field is None or type(field.default) is not int else [name, field.default]


def _inner(spec: Any) -> list[str | bool | None]:
    """Return the model type of an inner config that names none, and whether one that it names counts."""
    named = not issubclass(spec.config_class, PreTrainedConfig)
    return [spec.model_type or None, named]


def _kinds(kind: Any) -> Iterable[str]:
    """Yield the kinds of JSON's values that a field of the type takes; nothing for what JSON cannot say."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SIMPLE:
        yield _SIMPLE[kind]
    elif origin in (typing.Union, types.UnionType):
        for each in args:
            yield from _kinds(each)
    elif origin is typing.Literal:
        yield from (f"={json.dumps(each)}" for each in args)
    elif {kind, origin} & {list, Sequence}:
        inner = "|".join(sorted(set(_kinds(args[0])))) if args else ANY
        yield "list" if ANY in inner.split("|") else f"list[{inner}]"
    elif not {kind, origin} & {tuple, torch.dtype}:
        yield "dict" if _is_object(origin or kind) else ANY


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, (PreTrainedConfig, dict))


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
