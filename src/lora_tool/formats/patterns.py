r"""The regular expressions of an adapter's config, matched as PEFT matches them, and refused where they could hang us.

`rank_pattern` and `alpha_pattern` give a module the value of the first key whose regex ``(.*\.)?(key)$`` matches its
path (peft 0.21, `other.py::get_pattern_key`). Trying every key on every module takes hours where both are thousands.
But most keys are plain paths, which can only match an end of the module of their own length: one dict look-up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from msgspec import Struct

_MAX_PATTERN = 200_000
"""A pattern that lists every module of a large model by its path has some 30,000 characters."""
_MAX_REPEATS = 8
"""Repeats one after the other, of one branch: the steps of a match grow with the path's length to this power."""
_BEGINNING = "\n"
"""Stands in a path for the ``^`` that it must begin with."""
_PATH = re.compile(r"\^?(?:[\w\-.]|\\\.)+\Z")
r"""A key that is a path: a dot stands for any character, ``\.`` for a dot; after ``^`` it is the whole path."""


_OF_NAMES = re.compile(r"(?:\.\*|\\\.|[A-Za-z_\-|()^$?:!=<])+\Z")


class Patterns:
    """The keys of one table, in its order. Raises ValueError for a key that `compiled` refuses."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)
        self._paths: dict[int, dict[tuple[int, ...], dict[str, int]]] = defaultdict(dict)
        """Length of a key that is a path → where any character may stand in it → its text → its place in the table."""
        self._others: list[tuple[int, re.Pattern[str]]] = []
        for place, key in enumerate(self._keys):
            if not is_path(key):
                self._others.append((place, _regex(key)))
                continue
            marked = key.replace("^", _BEGINNING).replace(r"\.", "\0")
            text, anything = marked.replace("\0", "."), tuple(at for at, mark in enumerate(marked) if mark == ".")
            self._paths[len(text)].setdefault(anything, {}).setdefault(text, place)

    def first(self, module: str) -> str | None:
        """Return the first key that matches the module path, None where none does."""
        if not self._keys:
            return None
        if "\n" in module:  # a dot does not match it, and a $ matches before it
            return next((key for key in self._keys if _regex(key).match(module)), None)
        ends = (_BEGINNING + module, *_ends(module))
        first = min((place for end in ends for place in self._places(end)), default=len(self._keys))
        for place, regex in self._others:
            if place > first:
                break
            if regex.match(module):
                first = place
        return self._keys[first] if first < len(self._keys) else None

    def _places(self, end: str) -> Iterator[int]:
        """Yield the places of keys that match all of this end of a module path."""
        for anything, held in self._paths.get(len(end), {}).items():
            characters = list(end)
            for at in anything:
                characters[at] = "."
            place = held.get("".join(characters))
            if place is not None:
                yield place


def _ends(module: str) -> Iterator[str]:
    """Yield the module path, and the rest of it after each dot."""
    return accumulate(reversed(module.split(".")), lambda end, part: f"{part}.{end}")


def is_path(key: str) -> bool:
    """Return whether a key is a path, which needs no compiling to be known as harmless."""
    return len(key) <= _MAX_PATTERN and _PATH.match(key) is not None


def ignores_numbers(key: str) -> bool:
    """Return whether a key matches all or none of the modules whose paths differ only in their numbers.

    Numbers are the parts of a path that are digits, as those of layers and experts. True only where it is plain: of
    paths without a number, and of patterns that are names, `.*` and alternatives of these.
    """
    if is_path(key):
        parts = key.removeprefix("^").replace(r"\.", ".").split(".")
        return all(part and not part.isdigit() for part in parts)
    return _OF_NAMES.match(key) is not None


def _regex(key: str) -> re.Pattern[str]:
    return compiled(rf"(.*\.)?({key})$")


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern. Raises ValueError where it is invalid or could run for ever."""
    reason = _danger(pattern)
    if reason:
        raise ValueError(f"is a regular expression that {reason}")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a valid regular expression: {error}") from error


def _danger(pattern: str) -> str | None:
    """Say why a pattern might backtrack for ever: a repeated group that itself repeats or branches, or many repeats."""
    if len(pattern) > _MAX_PATTERN:
        return f"is {len(pattern):,} characters long"
    text = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern)
    groups = [_Group()]
    for at, character in enumerate(text):
        if character == "(":
            groups.append(_Group())
        elif character == ")" and len(groups) > 1:
            inner = groups.pop()
            repeated = text[at + 1 : at + 2] in ("*", "+", "{")
            if repeated and (inner.branches or inner.most):
                return "repeats a group that repeats or branches inside, and could run for ever"
            groups[-1].repeats += inner.most
            groups[-1].branches |= inner.branches
        elif character == "|":
            groups[-1].next_branch()
        elif character == "?" and text[at - 1 : at] not in ("(", "*", "+", "}", "?"):
            groups[-1].branches = True
        elif character in "*+" or (character == "{" and "," in text[at:].partition("}")[0]):
            groups[-1].repeats += 1
    if max(group.most for group in groups) > _MAX_REPEATS:
        return f"has more than {_MAX_REPEATS} repeats one after the other"
    return None


class _Group(Struct):
    """A group of a pattern while it is read: how often the branch that is open repeats, and the worst before it."""

    repeats: int = 0
    before: int = 0
    branches: bool = False

    @property
    def most(self) -> int:
        return max(self.before, self.repeats)

    def next_branch(self) -> None:
        self.before, self.repeats, self.branches = self.most, 0, True
