"""The sizes that a config means: products and sums of its fields, under the names that its model type has for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lora_tool.formats.model_config import ModelConfig

_NUMBERS = frozenset({"+", "0"})
_ABSENT, _OUTSIDE = object(), object()
_SEVERAL = 2


def kinds_of(value: object) -> frozenset[str]:
    """Return what kinds of value a field of a config holds, in the words of the table: a list's are those in it."""
    match value:
        case list() | tuple():
            return frozenset(each for each in value if isinstance(each, str))
        case None | bool():
            word = {None: "null", True: "true", False: "false"}[value]
        case float():
            word = f"{value:g}"
        case _:
            word = "{}" if isinstance(value, dict) else str(value)
    return frozenset({word})


def beyond_the_table(row: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return a field of a config whose value the models that made the row did not have; None without one.

    Their tensors may be others: the row says nothing about such a config.
    """
    absent = frozenset(row["absent"])
    for words, paths in row["sampled"].items():
        known = frozenset(words.split(" "))
        for path in paths.split(" "):
            if not _is_covered(_said(config, path, row["aliases"]), known, absent=path in absent):
                return str(path)
    return None


def changed_in(row: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the fields of a config that are of another kind than in the small config that the row was made from: the
    first of the words.
    """
    found = []
    for words, paths in row["sampled"].items():
        usual = frozenset(words.split(" ")[:1])
        for path in paths.split(" "):
            value = _said(config, path, row["aliases"])
            if not isinstance(value, list) and not _is_covered(value, usual, absent=False):
                found.append(path)
    return found


def _said(config: Mapping[str, Any], path: str, aliases: Mapping[str, str]) -> object:
    """Return the value of a field, `_ABSENT` without one, `_OUTSIDE` of an inner config that is not there."""
    found: Any = config
    *outer, name = path.split(".")
    for part in outer:
        found = found.get(part, {}) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return _OUTSIDE
    return found.get(name, found.get(aliases.get(name), _ABSENT))


def _is_covered(value: object, known: frozenset[str], *, absent: bool) -> bool:
    if value is _OUTSIDE or value is _ABSENT:
        return value is _OUTSIDE or not absent
    if known <= _NUMBERS and not (type(value) is int or isinstance(value, float)):
        return True  # a size that is none: LT317 tells
    positive = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return (positive and "+" in known) or kinds_of(value) <= known


class Sizes:
    """The fields of one config that decide shapes, and those that follow others where they are left out."""

    def __init__(self, row: Mapping[str, Any], config: ModelConfig) -> None:
        self._raw = config.raw
        self._row = row

    @property
    def tied(self) -> bool | None:
        """Return whether the config ties the embeddings to the output layer."""
        text = self._raw.get("text_config")
        said = self._raw.get("tie_word_embeddings", (text if isinstance(text, dict) else {}).get("tie_word_embeddings"))
        told: bool | None = said if isinstance(said, bool) else self._row["tie_word_embeddings"]
        return told

    @property
    def untried(self) -> str | None:
        """Why the table may be wrong about this config: it was made with each of the config's values, not with all at
        once. None for a config of which it is certain.
        """
        changed = changed_in(self._row, self._raw)
        if len(changed) < _SEVERAL:
            return None
        fields = " and ".join(f"`{path}`" for path in changed[:3])
        return f"lora-tool's table of {self._row['model_type']} models may be wrong about {fields} together"

    @property
    def doubtful(self) -> bool:
        """Whether the config has a field that the class reads and the table does not know, or heads that do not divide
        its width, of which classes make a smaller size.
        """
        head_dim = self._raw.get("head_dim")
        usual = self.value("hidden_size/num_attention_heads")
        inner = (f"{name}." for name, value in self._raw.items() if isinstance(value, dict))
        return any(map(self._is_uneven, ("", *inner))) or any(
            self._raw.get(name) is not None and not (name == "head_dim" and head_dim == usual)
            for name in self._row["undeclared"]
        )

    def _is_uneven(self, part: str) -> bool:
        width, heads, own = (self._field(part + each) for each in ("hidden_size", "num_attention_heads", "head_dim"))
        return bool(width and heads and width % heads and own in (None, width // heads))

    def value(self, expression: str | int | None, *, deep: bool = True) -> int | None:
        """Return the size that an expression of the table means under this config, None where it is not known."""
        if not isinstance(expression, str):
            return expression
        total = 0
        for term in expression.split("+"):
            above, *below = term.split("/")
            size = divisor = 1
            for name in above.split("*"):
                factor = self._field(name, deep=deep)
                if factor is None:
                    return None
                size *= factor
            for name in below:
                divisor *= self._field(name, deep=deep) or 0
            if not divisor:
                return None
            total += size // divisor
        return total

    def left_out(self, expressions: Iterable[str | int | None]) -> list[str]:
        """Return the config's own fields that decide these sizes, follow no other, and have no number in it."""
        fields: set[str] = set()
        for each in expressions:
            if isinstance(each, str):
                fields.update(re.split(r"[+*/]", each))
        fields.discard("num_labels")
        # of an inner config transformers itself leaves out what has its default
        return sorted(each for each in fields if "." not in each and self._field(each, deep=True) is None)

    def _field(self, name: str, *, deep: bool = False) -> int | None:
        if name.lstrip("-").isdecimal():
            return int(name)
        if name == "num_labels":
            return None
        found: Any = self._raw
        for part in name.split("."):
            found = found.get(part, found.get(self._row["aliases"].get(part))) if isinstance(found, dict) else None
        if type(found) is int:
            return found
        follows = self._row["follows"].get(name) if found is None and deep else None
        return self.value(follows, deep=False)
