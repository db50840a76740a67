"""Records with abstract methods, records that a notebook shows, and what is made once for a record that keeps it."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from msgspec import StructMeta

from lora_tool.core.display import as_html

K = TypeVar("K")
V = TypeVar("V")


class Shown:
    """A result that a notebook shows as the text that `str()` gives."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return as_html(str(self))


class AbstractRecord(StructMeta, ABCMeta):
    """The metaclass of records of which none can be made before all abstract methods are there."""


def kept(make: Callable[[K], V]) -> Callable[[K], V]:
    """Return `make`, called once for each object: the object keeps the result, whose type only `make` has to know.

    It is `cached_property` for functions of higher floors. The object needs a `__dict__`; what is raised is not kept.
    """
    name = f"{make.__module__}.{make.__qualname__}"

    @wraps(make)
    def made_once(owner: K) -> V:
        held = vars(owner)
        if name not in held:
            held[name] = make(owner)
        result: V = held[name]
        return result

    return made_once
