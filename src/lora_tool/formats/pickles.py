"""Reading pickles without running them: nothing that a pickle names is imported, called or changed.

A pickle is a program for a stack machine. Two of its instructions are dangerous: GLOBAL imports a name, REDUCE calls
the object on the stack. Here a name gets either one of the few meanings that the reader of a format provides, or an
inert `Stub` class; nothing else callable is ever on the stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lora_tool.formats.pickle_machine import DEEPEST, MOST_CONTAINERS, Machine, Refused
from lora_tool.formats.pickle_objects import Global, Stub

MAX_PICKLE_BYTES = 256 << 20
"""The structure of a checkpoint of 100,000 tensors takes about 20 MB; the tensors' bytes are never in it."""

_MOST_OF_NAMES = 1_000_000
"""Containers that are made where nothing but names is wanted."""
_PROTOCOL = b"\x80"
"""The first instruction since protocol 2."""


def load(
    data: bytes, *, known: Mapping[Global, Any], persistent: Callable[[Any], Any]
) -> tuple[Any, Mapping[Global, bool]]:
    """Return the object that the pickle `data` describes, with `Stub`s in the place of unknown classes, and these
    classes' names, with whether the pickle calls them.

    `known` are the names with a meaning, `persistent` returns the object of a persistent id. Dictionaries and sets are
    plain ones, whatever their sort. Time and memory are bounded by a multiple of the pickle's length. Raises ValueError
    with a sentence for anything that is not a whole, plain pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(
            f"has a pickle of {len(data):,} bytes, more than the {MAX_PICKLE_BYTES:,} that lora-tool reads"
        )
    machine = Machine(data, known, persistent)
    try:
        loaded = machine.run()
    except Refused as error:
        raise ValueError(f"holds a pickle {error}") from error
    except MemoryError as error:
        raise ValueError("holds a pickle that needs more memory than there is") from error
    # a broken pickle can make the stack machine raise anything: TypeError, KeyError, IndexError, …
    except Exception as error:
        raise ValueError(f"holds a pickle that cannot be read: {error}") from error
    _require_plain(loaded)
    return loaded, {**machine.unknown, **names_in(data, machine.end)}


def names_in(data: bytes, at: int = 0) -> Mapping[Global, bool]:
    """Return the names in the pickles that lie one after the other in `data`, from the byte `at` on, and whether they
    are called; up to the first instruction that no checkpoint needs. In a pickle that says it is one, all names before
    such an instruction count as called.
    """
    found: dict[Global, bool] = {}
    while at < len(data):
        machine = Machine(data, {}, lambda _: None, at)
        machine.most = _MOST_OF_NAMES
        with contextlib.suppress(Exception):  # as in `load`; the names before it are what matters
            machine.run()
        failed = machine.end == at
        stated = failed and data.startswith(_PROTOCOL, at)
        found |= {name: called or stated for name, called in machine.unknown.items()}
        at = len(data) if failed else machine.end
    return found


def no_storage(_: object) -> NoReturn:
    """Raise `ValueError` for a storage, as `persistent` of metadata, which never has one."""
    raise ValueError("holds a pickle with storages, which metadata never has")


def _require_plain(loaded: object) -> None:
    """Raise ValueError for objects that contain themselves, nest too deep, or are too large to walk through.

    A pickle of 300 bytes can hold a list of two equal lists of two equal lists…, which no memory can print.
    """
    sizes: dict[int, int] = {}
    open_: set[int] = set()
    left: list[tuple[object, bool]] = [(loaded, False)]
    held = 0
    while left:
        found, seen = left.pop()
        key, children = id(found), _children(found)
        if seen:
            open_.discard(key)
            sizes[key] = min(1 + sum(sizes.get(id(child), 1) for child in children), MOST_CONTAINERS**2)
            held += len(children)
        elif key in open_:
            if not isinstance(found, Stub):  # objects may know each other; nothing here walks through them
                raise ValueError("holds a pickle of something that contains itself")
        elif children and key not in sizes:
            open_.add(key)
            if len(open_) > DEEPEST:
                raise ValueError(f"holds a pickle that is nested more than {DEEPEST} deep")
            left.append((found, True))
            left.extend((child, False) for child in children)
    if sizes.get(id(loaded), 1) > 1_000_000 + 20 * held:
        raise ValueError(f"holds a pickle of {held:,} objects that unfolds to {sizes[id(loaded)]:,}")


def _children(found: object) -> Sequence[object]:
    if isinstance(found, dict):
        return [*found.keys(), *found.values()]
    if isinstance(found, Stub):
        return (found.args, found.items, found.state)
    # a LazyTensor is a tuple, too, and was checked when it was made
    return list(found) if type(found) in (list, tuple, set) else ()  # type: ignore[call-overload]
