"""What stands in a pickle that is read for the names in it: a meaning that a reader gives, or an inert object."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_DIMENSIONS = 64
"""Torch's own limit of a tensor's dimensions."""

Global = tuple[str, str]
"""Module and name, as GLOBAL gives them."""


class Known(NamedTuple):
    """A name that the reader gives a meaning. What `build` returns can be hashed in no time."""

    build: Callable[..., Any]


class Stub:
    """An object of an unknown class. It keeps the arguments and state from the pickle, and does nothing."""

    __slots__ = ("args", "items", "state")
    named: ClassVar[Global] = ("", "")
    args: tuple[object, ...]
    items: list[object]
    state: object

    @classmethod
    def made_with(cls, args: tuple[object, ...]) -> Self:
        """Return an object that the pickle made with `args`."""
        stub = cls()
        # the tuple itself: copies of one long tuple could fill the memory
        stub.args, stub.items, stub.state = args, [], None
        return stub

    def get(self, field: str, kind: type[object] | tuple[type[object], ...] = object) -> Any:  # noqa: ANN401 - a field of an unknown class
        """Return the attribute `field` that the pickle gave the object, None where it gave none of this `kind`."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        value = next((state[field] for state in states[:2] if isinstance(state, dict) and field in state), None)
        return value if isinstance(value, kind) else None


DICT, SET, ATTRIBUTE = Known(dict), Known(set), Known(getattr)
"""Those that the machine handles itself; pickle names a class in a class by `getattr`."""
BUILT_IN: dict[Global, Known] = {
    ("collections", "OrderedDict"): DICT,
    ("__builtin__", "dict"): DICT,
    ("builtins", "dict"): DICT,
    ("__builtin__", "set"): SET,
    ("builtins", "set"): SET,
    ("__builtin__", "frozenset"): SET,
    ("builtins", "frozenset"): SET,
    ("__builtin__", "getattr"): ATTRIBUTE,
    ("builtins", "getattr"): ATTRIBUTE,
}
"""Names that every reader knows: no reader distinguishes the sorts of dictionaries and sets."""


def name_of(value: object) -> str:
    """Return the qualified name of a class or function that a pickle names and no reader knows; "" for all else."""
    return ".".join(value.named) if isinstance(value, type) and issubclass(value, Stub) else ""


def stub_class(module: str, name: str) -> type[Stub]:
    """Return a new class in the place of the one that the pickle names."""
    return cast("type[Stub]", type(name, (Stub,), {"__slots__": (), "named": (module, name)}))


def as_json(value: object) -> str:
    """Return a pickle's value as JSON; objects that JSON lacks are named by their class."""
    return json.dumps(_with_names(value), sort_keys=isinstance(value, dict), default=lambda found: type(found).__name__)


def _with_names(value: object) -> object:
    """Return the value with text for the keys of every dictionary, as JSON has them."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _with_names(inner) for key, inner in value.items()}
    return [_with_names(inner) for inner in value] if isinstance(value, list | tuple) else value
