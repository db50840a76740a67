"""What transformers takes for each field of a model's config.json, told without transformers.

`config_fields.jsonl` has a line for each model type: kinds of values → the fields that take only these, and the
model types of inner configs. It was made from the classes' own annotations, which
transformers 5 enforces when it reads a config (`python -m tests.tensor_tables.config_fields`). A field that is not in
its row may have any value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct

TABLE = Path(__file__).with_name("config_fields.jsonl")
ANY = "any"
"""The kind that all values are of."""
_DEEPEST = 8
_FLOAT = "__float__"
"""The key of the object that transformers writes for infinity and NaN."""
_RENAMED = {"rope_scaling": "rope_parameters"}
"""Fields of older files that transformers reads as another, if anything stands there."""
_IN_WORDS = {
    "int": "an integer",
    "float": "a number with a decimal point",
    "bool": "true or false",
    "str": "a string",
    "dict": "an object",
    "null": "null",
    "list": "a list",
}
_TYPES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "null": type(None)}


class TypedConfig(Struct, frozen=True, kw_only=True):
    """A config, or one inside it, with the model type whose class reads it; `context` stands before its fields."""

    context: str
    model_type: str
    table: Mapping[str, Any]

    def misfits(self) -> Iterator[tuple[str, str]]:
        """Yield the fields whose values the class does not take, and in words what it takes."""
        kinds = _kinds(self.model_type)
        for name, value in self.table.items():
            taken = kinds.get(name, kinds.get(_RENAMED.get(name, ""), ANY) if value else ANY)
            if not takes(taken, value):
                yield name, in_words(taken)

    def has(self, name: str) -> bool:
        """Return whether the class has a field of that name that does not take everything."""
        return name in _kinds(self.model_type)

    @property
    def depth(self) -> tuple[str, object] | None:
        """The field that says how many layers there are, and its value, the class's own where the config has none; None
        where the class does not check `layer_types` by it.
        """
        row = _row(self.model_type)
        if "depth" not in row or "own_layers" in row:
            return None
        name, usual = row["depth"]
        return name, self.table.get(name, usual)


def typed_configs(table: Mapping[str, Any]) -> Iterator[TypedConfig]:
    """Yield the config and those inside it, each of a model type that transformers has; of others nothing is said."""
    yield from _typed("", table.get("model_type"), table, _DEEPEST)


def _typed(context: str, model_type: object, table: Mapping[str, Any], deepest: int) -> Iterator[TypedConfig]:
    if model_type == "mistral" and not context and "layer_types" in table:
        model_type = "ministral"  # as transformers reads it
    row = _row(model_type) if isinstance(model_type, str) else {}
    if not row or not deepest:
        return
    yield TypedConfig(context=context, model_type=str(model_type), table=table)
    for name, (usual, named) in row.get("inner", {}).items():
        inner = table.get(name)
        if isinstance(inner, Mapping):
            yield from _typed(
                f"{context}{name}.", inner.get("model_type", usual) if named else usual, inner, deepest - 1
            )


def takes(kinds: str, value: object) -> bool:
    """Return whether a value of JSON is of one of the `kinds`, in the words of the table: ``int|list[int]|null``."""
    return any(_is_of(kind, value) for kind in _split(kinds))


def in_words(kinds: str) -> str:
    """Return the kinds in words."""
    said = [kind.removeprefix("=") if kind.startswith("=") else _kind_in_words(kind) for kind in _split(kinds)]
    return " or ".join(said)


def _kind_in_words(kind: str) -> str:
    return _IN_WORDS[kind.partition("[")[0]]


def _is_of(kind: str, value: object) -> bool:
    if kind == ANY:
        return True
    if kind.startswith("="):
        only = json.loads(kind[1:])
        return type(value) is type(only) and value == only
    name, _, inner = kind.partition("[")
    if name == "list":
        return isinstance(value, list) and (not inner or all(takes(inner[:-1], each) for each in value))
    return type(value) is _TYPES[name] or (name == "float" and isinstance(value, dict) and value.keys() == {_FLOAT})


def _split(kinds: str) -> list[str]:
    """Return the kinds between the bars that are in no brackets."""
    found, depth = [""], 0
    for letter in kinds:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "|" and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


@cache
def _kinds(model_type: str) -> Mapping[str, str]:
    """Return the kinds of values that each field of a model type takes, but for fields that take all."""
    fields: Mapping[str, str] = _row(model_type)["fields"]
    return {name: kinds for kinds, names in fields.items() for name in names.split()}


@cache
def _row(model_type: str) -> Mapping[str, Any]:
    """Return the line of a model type; empty where transformers has no such type."""
    beginning = f'{{"model_type":{json.dumps(model_type)},'
    with TABLE.open(encoding="utf-8") as lines:
        line = next((line for line in lines if line.startswith(beginning)), "{}")
    row: Mapping[str, Any] = json.loads(line)
    return row
