"""Reading pickles without running them: nothing that a pickle names is imported, called or changed.

A pickle is a program for a stack machine (CPython, `Lib/pickletools.py`). Two of its instructions are dangerous: GLOBAL
imports a name, REDUCE calls what is on the stack. Here a name becomes either one of the few callables that the reader
of a format provides, or an inert `Stub` class; nothing else callable can ever be on the stack.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_PICKLE_BYTES = 256 << 20
"""The structure of a checkpoint of 100,000 tensors takes about 20 MB; the tensors' bytes are never in it."""

_MOST_OBJECTS = 50_000_000
_DEEPEST = 200

Global = tuple[str, str]
"""Module and name, as GLOBAL gives them."""


class Known(NamedTuple):
    """A name that the reader gives a meaning. A tuple, because BUILD could change the fields of any other object."""

    build: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - whatever the pickle says, checked by `build`
        return self.build(*args)


class _Frozen(type):
    """The type of stub classes: BUILD cannot set attributes on them."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be set")


class Stub(metaclass=_Frozen):
    """An object of a class that is not known. It keeps what the pickle gave it, and does nothing."""

    __slots__ = ("args", "items", "state")
    qualified_name: ClassVar[str] = ""
    args: tuple[object, ...]
    items: list[object]
    state: object

    def __new__(cls, *args: object, **_: object) -> Self:
        stub = super().__new__(cls)
        stub.args, stub.items, stub.state = args, [], None
        return stub

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        """Keep `item`: APPEND calls this on an object that is no list."""
        self.items.append(item)

    def __setitem__(self, key: object, value: object) -> None:
        self.items.append((key, value))

    def get(self, field: str, default: Any = None) -> Any:  # noqa: ANN401 - a field of an unknown class
        """Return the attribute `field` that the pickle gave the object."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and field in state:
                return state[field]
        return default


_BUILT_IN: dict[Global, Any] = {
    # all of them immutable types of the interpreter, which BUILD cannot change
    ("collections", "OrderedDict"): OrderedDict,
    ("__builtin__", "set"): set,
    ("builtins", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
    ("builtins", "frozenset"): frozenset,
}


class _Unpickler(pickle.Unpickler):
    """The interpreter's own stack machine, with its one door to the outside closed."""

    def __init__(self, data: bytes, known: Mapping[Global, Any], persistent: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="surrogateescape")
        self._known = known
        self._persistent = persistent
        self._stubs: dict[Global, type[Stub]] = {}

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a Known, a Stub class or a built-in type
        found = _BUILT_IN.get((module, name)) or self._known.get((module, name))
        return self._stub(module, name) if found is None else found

    def _stub(self, module: str, name: str) -> type[Stub]:
        if (module, name) not in self._stubs:
            body = {"__slots__": (), "qualified_name": f"{module}.{name}"}
            self._stubs[module, name] = cast("type[Stub]", _Frozen(name, (Stub,), body))
        return self._stubs[module, name]

    def persistent_load(self, pid: Any) -> Any:  # noqa: ANN401 - the format's reader checks it
        return self._persistent(pid)


def load(data: bytes, *, known: Mapping[Global, Any], persistent: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return the object that the pickle `data` describes, with `Stub`s in the place of unknown classes.

    `known` are the names with a meaning, `persistent` turns a persistent id into an object. Raises ValueError with a
    sentence for anything that is not a whole, plain pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"has a pickle of {len(data):,} bytes, more than the {MAX_PICKLE_BYTES:,} we read")
    _scan(data)
    try:
        loaded = _Unpickler(data, known, persistent).load()
    except (MemoryError, KeyboardInterrupt):
        raise
    # a broken pickle can make the stack machine raise anything: TypeError, KeyError, UnpicklingError, …
    except Exception as error:
        raise ValueError(f"holds a pickle that cannot be read: {error}") from error
    _require_plain(loaded)
    return loaded


def _require_plain(loaded: object) -> None:
    """Raise ValueError for what contains itself, lies too deep, or would unfold to too much when it is walked through.

    A pickle of 300 bytes can hold a list of two equal lists of two equal lists…, which no memory can print.
    """
    sizes: dict[int, int] = {}
    open_: set[int] = set()
    left: list[tuple[object, bool]] = [(loaded, False)]
    while left:
        found, seen = left.pop()
        key, children = id(found), _children(found)
        if seen:
            open_.discard(key)
            sizes[key] = 1 + sum(sizes.get(id(child), 1) for child in children)
            if sizes[key] > _MOST_OBJECTS:
                raise ValueError(f"holds a pickle that unfolds to more than {_MOST_OBJECTS:,} objects")
        elif key in open_:
            if not isinstance(found, Stub):  # objects may know each other; nothing here walks through them
                raise ValueError("holds a pickle of something that contains itself")
        elif children and key not in sizes:
            open_.add(key)
            if len(open_) > _DEEPEST:
                raise ValueError(f"holds a pickle that is nested more than {_DEEPEST} deep")
            left.append((found, True))
            left.extend((child, False) for child in children)


def _children(found: object) -> Sequence[object]:
    if isinstance(found, dict):
        return [*found.keys(), *found.values()]
    if isinstance(found, Stub):
        return (found.args, found.items, found.state)
    # a LazyTensor is a tuple, too, and was checked when it was made
    return list(found) if type(found) in (list, tuple, set, frozenset) else ()  # type: ignore[call-overload]


# instructions that are harmless whatever their argument, with the argument's bytes (CPython, `Lib/pickletools.py`);
# LONG_BINPUT is among them up to an index of a million
_HARMLESS = re.compile(
    rb"(?:[(012NQRabdelstu}\])\x81\x85-\x89\x8f-\x94]|[Kh\x80q].|M..|[Jj].{4}|r..[\x00-\x0f]\x00|[G\x95].{8}"
    rb"|c[^\n]*\n[^\n]*\n)*",
    re.DOTALL,
)
_COUNTED = {**dict.fromkeys(b"U\x8a\x8cC", 1), **dict.fromkeys(b"TX\x8bB", 4), **dict.fromkeys(b"\x8d\x8e", 8)}
"""Instruction → bytes of the length that stands before its argument."""
_STOP, _LONG_BINPUT = b".r"


def _scan(data: bytes) -> None:
    """Raise ValueError unless `data` is a run of instructions of pickle protocol 2 to 5 that ends where it says.

    LONG_BINPUT of a huge index would make the interpreter reserve memory for that many entries, so indices are
    checked here, before. The text instructions of protocol 0 and the extension registry are refused.
    """
    at, end = 0, len(data)
    while True:
        # a length may lead beyond the end, and beyond any index
        found = _HARMLESS.match(data, min(at, end))
        at = found.end() if found else at
        if at >= end:
            raise ValueError("holds a pickle that ends without its STOP: truncated?")
        code = data[at]
        width = _COUNTED.get(code)
        if code == _STOP:
            return
        if width is not None:
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif code == _LONG_BINPUT and int.from_bytes(data[at + 1 : at + 5], "little") <= end:
            at += 5
        else:
            raise ValueError(
                f"holds a pickle with the instruction 0x{code:02x} at byte {at:,}, which no checkpoint needs"
            )
