"""Typed access to the fields of a JSON, TOML or YAML table, collecting every wrong one: `r: expected int, found "8"`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from lora_tool.core.choices import suggestion
from lora_tool.core.errors import Defect, Problem

_LARGEST = 2**63 - 1
"""No config has a larger number; beyond it, the arithmetic of a scaling overflows."""


class Fields:
    """One table of the file `path`. A field of the wrong type is noted in `problems` and read as its default.

    `context` stands before the names of the fields: ``text_config.``. Who wants no wrong field calls `require` at last.
    """

    def __init__(self, table: Mapping[str, Any], path: Path | str, context: str = "") -> None:
        self.table = table
        self.path = path
        self.context = context
        self.problems: list[Problem] = []

    def note(self, name: str, message: str) -> None:
        """Record that the field `name` is wrong."""
        subject = f"{self.context}{name}"
        self.problems.append(Problem(defect=Defect.BAD_FIELD, path=str(self.path), subject=subject, message=message))

    def expected(self, name: str, what: str, found: object) -> None:
        """Record that the field `name` should have been a `what`."""
        self.note(name, f"expected {what}, found {shown(found)}")

    def require(self, error: Callable[[str], Exception]) -> None:
        """Return if nothing was noted. Raises the first problem as an `error`."""
        if self.problems:
            raise error(str(self.problems[0]))

    def only(self, known: Collection[str]) -> None:
        """Note every field that is none of `known`."""
        for name in self.table:
            if name not in known:
                self.note(name, f"unknown key. {suggestion(str(name), known)}")

    def typed(
        self, name: str, what: str, fits: Callable[[Any], bool], default: object = None, *, null: bool = True
    ) -> Any:  # noqa: ANN401 - any type that `fits` accepts
        """Return the field `name`, the default where it is absent or `fits` rejects it, noted as not being a `what`.

        With `null` it is absent, too, where JSON has a null.
        """
        value = self.table.get(name)
        if value is None and (null or name not in self.table):
            return default
        if fits(value):
            return value
        self.expected(name, what, value)
        return default

    def inner(self, name: str) -> Fields:
        """Return the table in the field `name`, {} if absent; its faults are noted here."""
        table = self.typed(name, "table", lambda value: isinstance(value, Mapping), {})
        inner = Fields(table, self.path, f"{self.context}{name}.")
        inner.problems = self.problems
        return inner

    def integer(self, name: str, default: int, *, least: int | None = None) -> int:
        value: int = self.typed(name, "int", _is_int, default, null=False)
        if -_LARGEST <= value <= _LARGEST and (least is None or value >= least):
            return value
        self.expected(name, "int" if least is None else f"int of at least {least}", value)
        return default

    def optional_integer(self, name: str) -> int | None:
        found: int | None = self.typed(name, "int", _is_int)
        return found

    def number(self, name: str, default: float) -> float:
        found: float = self.typed(name, "number", is_number, default, null=False)
        return found

    def boolean(self, name: str) -> bool:
        found: bool = self.typed(name, "true or false", lambda value: isinstance(value, bool), default=False)
        return found

    def optional_boolean(self, name: str) -> bool | None:
        return None if self.table.get(name) is None else self.boolean(name)

    def text(self, name: str, known: Sequence[str] = ()) -> str | None:
        """Return the string, with `known` one of those, or None."""
        value: str | None = self.typed(name, "string", lambda value: isinstance(value, str))
        if value is None or not known or value in known:
            return value
        *others, last = known
        self.expected(name, f"{', '.join(others)} or {last}", value)
        return None

    def names(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None."""
        found = self.typed(name, "list of strings", is_strings)
        return None if found is None else tuple(found)

    def listed(self, name: str, known: Collection[str] = ()) -> tuple[str, ...]:
        """Return one string or a list of strings as a tuple, () if absent; with `known` each has to be one of those."""
        value = self.table.get(name)
        words = (value,) if isinstance(value, str) else self.names(name) or ()
        for word in words:
            if known and word not in known:
                self.note(name, f"{word!r} is none of {', '.join(known)}. {suggestion(word, known)}")
        return words

    def choice(self, name: str, known: Collection[str]) -> str | None:
        """Return the word of `known` in the field, None if absent."""
        word = self.text(name)
        return word if word is None or self.listed(name, known) else None


def _is_int(value: object) -> bool:
    return type(value) is int


def is_strings(value: object) -> TypeGuard[list[str]]:
    """Return whether `value` is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether `value` is an object of JSON."""
    return isinstance(value, dict)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether `value` is a number to calculate with: JSON in Python also has NaN, Infinity and endless ints."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def shown(value: object) -> str:
    """Return `value` as JSON, cut to fit into a sentence."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - half a terminal line
