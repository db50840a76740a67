"""Reading pickles without running them: nothing that a pickle names is imported, called or changed.

A pickle is a program for a stack machine (CPython, `Lib/pickletools.py`). Two of its instructions are dangerous: GLOBAL
imports a name, REDUCE calls what is on the stack. This machine gives a name either one of the few meanings that the
reader of a format provides, or an inert `Stub` class; nothing else callable is ever on its stack.

It is our own because the interpreter's machine, made safe in that way, can still be made to hang or to crash: hashing a
tuple of a tuple of a tuple takes time without end, or stack without end. Here every instruction costs about the same,
and what is kept is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_PICKLE_BYTES = 256 << 20
"""The structure of a checkpoint of 100,000 tensors takes about 20 MB; the tensors' bytes are never in it."""

MOST_DIMENSIONS = 64
"""Torch's own limit of a tensor's dimensions."""

_DEEPEST = 200
_MOST_CONTAINERS = 10_000_000
_MOST_MEMOIZED = 20_000_000
_MOST_NAMES = 10_000
"""Of different globals: a real checkpoint has about ten."""
_LONGEST_NUMBER = 64
"""Bytes of a number: hashing a longer one takes as long as it is."""
_MOST_ODD_KEYS = 5_000
"""Of keys that one can choose so that they collide: large numbers and tuples. Text is hashed with a secret."""
_SMALL = 1 << 32
_LARGEST_KEY = 100
"""Elements of a tuple that is a key, with those of the tuples in it."""

Global = tuple[str, str]
"""Module and name, as GLOBAL gives them."""


class Known(NamedTuple):
    """A name that the reader gives a meaning. What `build` returns can be hashed in no time."""

    build: Callable[..., Any]


class Stub:
    """An object of a class that is not known. It keeps what the pickle gave it, and does nothing."""

    __slots__ = ("args", "items", "state")
    qualified_name: ClassVar[str] = ""
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

    def get(self, field: str, default: Any = None) -> Any:  # noqa: ANN401 - a field of an unknown class
        """Return the attribute `field` that the pickle gave the object."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states[:2]:
            if isinstance(state, dict) and field in state:
                return state[field]
        return default


_DICT, _SET = Known(dict), Known(set)
_BUILT_IN: dict[Global, Known] = {
    ("collections", "OrderedDict"): _DICT,
    ("__builtin__", "dict"): _DICT,
    ("builtins", "dict"): _DICT,
    ("__builtin__", "set"): _SET,
    ("builtins", "set"): _SET,
    ("__builtin__", "frozenset"): _SET,
    ("builtins", "frozenset"): _SET,
}


def load(data: bytes, *, known: Mapping[Global, Any], persistent: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return the object that the pickle `data` describes, with `Stub`s in the place of unknown classes.

    `known` are the names with a meaning, `persistent` turns a persistent id into an object. Dictionaries and sets are
    plain ones, whatever their sort. Time and memory are bounded by a multiple of the pickle's length. Raises ValueError
    with a sentence for anything that is not a whole, plain pickle of protocol 2 to 5.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"has a pickle of {len(data):,} bytes, more than the {MAX_PICKLE_BYTES:,} we read")
    try:
        loaded = _Machine(data, known, persistent).run()
    except Refused as error:
        raise ValueError(f"holds a pickle {error}") from error
    except MemoryError as error:
        raise ValueError("holds a pickle that needs more memory than there is") from error
    # a broken pickle can make the stack machine raise anything: TypeError, KeyError, IndexError, …
    except Exception as error:
        raise ValueError(f"holds a pickle that cannot be read: {error}") from error
    _require_plain(loaded)
    return loaded


class Refused(Exception):
    """What is wrong with the pickle, as the end of a sentence."""


class _Machine:
    """The stack machine. Each instruction costs about the same, whatever came before it."""

    def __init__(self, data: bytes, known: Mapping[Global, Any], persistent: Callable[[Any], Any]) -> None:
        self._data, self._at = data, 0
        self._known, self._persistent = known, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names: dict[Global, Any] = {}
        self._containers = self._odd_keys = 0

    def run(self) -> Any:  # noqa: ANN401, C901, PLR0912 - whatever the pickle says
        """Return what the program leaves on the stack at its STOP."""
        data, stack, memo, end = self._data, self._stack, self._memo, len(self._data)
        most = min(end, _MOST_MEMOIZED)
        at = self._at
        # three of four instructions are among the first ones here, written out because a call takes five times as long
        while at < end:
            code = data[at]
            at += 1
            if code == _LONG_BINPUT:
                index = int.from_bytes(data[at : at + 4], "little")
                if index > most:  # real ones count up from 0
                    raise Refused(f"with the number {index:,} in its memo, which no checkpoint needs")
                memo[index] = stack[-1]
                at += 4
            elif code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _BINUNICODE:
                start = at + 4
                at = start + int.from_bytes(data[at:start], "little")
                if at > end:
                    break
                stack.append(data[start:at].decode("utf-8", "surrogatepass"))
            elif code == _BINPUT:
                memo[data[at]] = stack[-1]
                at += 1
            elif code == _MARK:
                self.mark()
            elif code == _STOP:
                return stack.pop()
            else:
                instruction = _INSTRUCTIONS.get(code)
                if instruction is None:
                    raise Refused(f"with the instruction 0x{code:02x} at byte {at - 1:,}, which no checkpoint needs")
                self._at = at
                instruction(self)
                at = self._at
        raise Refused("that ends without its STOP: truncated?")

    def _take(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise Refused("that ends without its STOP: truncated?")
        return self._data[self._at - count : self._at]

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise Refused("with a name that has no end")
        return self._take(end + 1 - self._at)[:-1].decode()

    # numbers and texts

    def push(self, value: object) -> None:
        self._stack.append(value)

    def skip(self, width: int) -> None:
        self._take(width)

    def integer(self, width: int, *, signed: bool = False) -> None:
        self._stack.append(int.from_bytes(self._take(width), "little", signed=signed))

    def long(self, width: int) -> None:
        size = self._number(width)
        if size > _LONGEST_NUMBER:
            raise Refused(f"with a number of {size:,} bytes, which no checkpoint needs")
        self.integer(size, signed=True)

    def double(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, width: int, errors: str = "surrogatepass") -> None:
        self._stack.append(self._take(self._number(width)).decode("utf-8", errors))

    def binary(self, width: int) -> None:
        self._stack.append(self._take(self._number(width)))

    # the stack and the memo

    def mark(self) -> None:
        if len(self._marks) > _DEEPEST * 10:
            raise Refused(f"that is nested more than {_DEEPEST} deep")
        self._marks.append(len(self._stack))

    def _to_mark(self) -> list[Any]:
        """Take everything off the stack that lies above the last mark."""
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def pop_mark(self) -> None:
        self._to_mark()

    def memoize(self) -> None:
        if len(self._memo) >= _MOST_MEMOIZED:
            raise Refused(f"of more than {_MOST_MEMOIZED:,} objects")
        self._memo[len(self._memo)] = self._stack[-1]

    # containers

    def _new(self, container: object) -> None:
        self._containers += 1
        if self._containers > _MOST_CONTAINERS:
            raise Refused(f"of more than {_MOST_CONTAINERS:,} objects")
        self._stack.append(container)

    def empty_list(self) -> None:
        self._new([])

    def empty_dict(self) -> None:
        self._new({})

    def empty_set(self) -> None:
        self._new(set())

    def new_list(self) -> None:
        self._new(self._to_mark())

    def new_dict(self) -> None:
        items = self._to_mark()
        self._new({})
        self._put_all(items)

    def new_set(self) -> None:
        items = self._to_mark()
        self._new(set())
        self._add_all(items)

    def new_tuple(self) -> None:
        self._new(tuple(self._to_mark()))

    def tuple1(self) -> None:
        self._new((self._stack.pop(),))

    def tuple2(self) -> None:
        last = self._stack.pop()
        self._new((self._stack.pop(), last))

    def tuple3(self) -> None:
        last, middle = self._stack.pop(), self._stack.pop()
        self._new((self._stack.pop(), middle, last))

    def append(self) -> None:
        self._append_all([self._stack.pop()])

    def appends(self) -> None:
        self._append_all(self._to_mark())

    def _append_all(self, items: Iterable[Any]) -> None:
        found = self._stack[-1]
        if type(found) is list:
            found.extend(items)
        elif isinstance(found, Stub):
            found.items.extend(items)
        else:
            raise Refused("that appends to what is no list")

    def setitem(self) -> None:
        value = self._stack.pop()
        self._put_all([self._stack.pop(), value])

    def setitems(self) -> None:
        self._put_all(self._to_mark())

    def _put_all(self, items: Sequence[Any]) -> None:
        """Put keys and values, which take turns, into what is on the top of the stack."""
        found = self._stack[-1]
        if type(found) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) is not str:
                    self._require_key(key)
                found[key] = value
        elif isinstance(found, Stub):
            found.items.extend(zip(items[::2], items[1::2], strict=True))
        else:
            raise Refused("that sets items of what is no dictionary")

    def additems(self) -> None:
        self._add_all(self._to_mark())

    def _add_all(self, items: Iterable[Any]) -> None:
        found = self._stack[-1]
        if type(found) is not set:
            raise Refused("that adds to what is no set")
        for item in items:
            self._require_key(item)
            found.add(item)

    def _require_key(self, key: object) -> None:
        """Raise `Refused` unless `key` is hashed in no time, and rarely collides."""
        if isinstance(key, Stub) or key is None or type(key) in (str, bytes, bool):
            return
        if type(key) is int and -_SMALL < key < _SMALL:
            return
        self._odd_keys += 1
        if self._odd_keys > _MOST_ODD_KEYS:
            raise Refused(f"with more than {_MOST_ODD_KEYS:,} keys that are neither text nor small numbers")
        left, seen = [key], 0
        while left:
            found = left.pop()
            seen += 1
            if type(found) is tuple:
                seen += len(found)
                left.extend(found[: _LARGEST_KEY + 1])
            if seen > _LARGEST_KEY:
                raise Refused(f"with a key of more than {_LARGEST_KEY} elements, which no checkpoint needs")

    # names, and what is made with them

    def name(self) -> None:
        module = self._line()
        self._stack.append(self._named(module, self._line()))

    def stack_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused("with a name that is no text")
        self._stack.append(self._named(module, name))

    def _named(self, module: str, name: str) -> Any:  # noqa: ANN401 - a meaning or a Stub class
        key = (module, name)
        if key not in self._names:
            if len(self._names) > _MOST_NAMES:
                raise Refused(f"with more than {_MOST_NAMES:,} names of classes")
            found = _BUILT_IN.get(key) or self._known.get(key)
            self._names[key] = _stub_class(module, name) if found is None else found
        return self._names[key]

    def reduce(self) -> None:
        args = self._stack.pop()
        self._make(self._stack.pop(), args)

    def reduce_with_keywords(self) -> None:
        self._stack.pop()
        self.reduce()

    def _make(self, what: object, args: object) -> None:
        if type(args) is not tuple:
            raise Refused("that calls something without arguments")
        if isinstance(what, type) and issubclass(what, Stub):
            self._new(what.made_with(args))
        elif what is _DICT or what is _SET:
            items = _listed(args)
            # one long list can be given again and again
            self._containers += 10 * len(items)
            if what is _DICT:
                self._new({})
                self._put_all([part for pair in items for part in _pair(pair)])
            else:
                self._new(set())
                self._add_all(items)
        elif isinstance(what, Known):
            self._new(what.build(*args[: 2 * MOST_DIMENSIONS]))
        else:
            raise Refused("that calls what is no class and no function")

    def build(self) -> None:
        state = self._stack.pop()
        found = self._stack[-1]
        if isinstance(found, Stub):
            found.state = state
        elif type(found) is not dict:  # the attributes of an ordered dictionary, `_metadata`, are of no use
            raise Refused("that changes what cannot be changed")

    def persistent(self) -> None:
        self._stack.append(self._persistent(self._stack.pop()))


_MARK, _STOP, _BININT1, _BINUNICODE = b"(.KX"
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = b"qrhj"
_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: partial(_Machine.skip, width=1),  # PROTO
    0x95: partial(_Machine.skip, width=8),  # FRAME
    ord("N"): partial(_Machine.push, value=None),
    0x88: partial(_Machine.push, value=True),
    0x89: partial(_Machine.push, value=False),
    ord("M"): partial(_Machine.integer, width=2),
    ord("J"): partial(_Machine.integer, width=4, signed=True),
    0x8A: partial(_Machine.long, width=1),
    0x8B: partial(_Machine.long, width=4),
    ord("G"): _Machine.double,
    # Python 2's texts, which may be anything
    ord("U"): partial(_Machine.text, width=1, errors="surrogateescape"),
    ord("T"): partial(_Machine.text, width=4, errors="surrogateescape"),
    0x8C: partial(_Machine.text, width=1),
    0x8D: partial(_Machine.text, width=8),
    ord("C"): partial(_Machine.binary, width=1),
    ord("B"): partial(_Machine.binary, width=4),
    0x8E: partial(_Machine.binary, width=8),
    0x96: partial(_Machine.binary, width=8),
    ord("0"): _Machine.pop,
    ord("1"): _Machine.pop_mark,
    0x94: _Machine.memoize,
    ord("]"): _Machine.empty_list,
    ord("l"): _Machine.new_list,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("}"): _Machine.empty_dict,
    ord("d"): _Machine.new_dict,
    ord("s"): _Machine.setitem,
    ord("u"): _Machine.setitems,
    0x8F: _Machine.empty_set,
    0x90: _Machine.additems,
    0x91: _Machine.new_set,
    ord(")"): partial(_Machine.push, value=()),
    ord("t"): _Machine.new_tuple,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("c"): _Machine.name,
    0x93: _Machine.stack_name,
    ord("R"): _Machine.reduce,
    0x81: _Machine.reduce,  # NEWOBJ
    0x92: _Machine.reduce_with_keywords,  # NEWOBJ_EX
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
"""What else pickles of protocol 2 to 5 are made of, than what `run` does by itself. DUP is not here: nothing writes it, and it is good for bombs alone."""


def _stub_class(module: str, name: str) -> type[Stub]:
    return cast("type[Stub]", type(name, (Stub,), {"__slots__": (), "qualified_name": f"{module}.{name}"}))


def _listed(args: tuple[object, ...]) -> Sequence[Any]:
    """Return what a dictionary or a set is made of."""
    if args and type(args[0]) not in (list, tuple):
        raise Refused("of a dictionary or set that is made of something odd")
    return cast("Sequence[Any]", args[0]) if args else ()


def _pair(pair: object) -> Sequence[Any]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:  # noqa: PLR2004 - a pair
        raise Refused("of a dictionary that is not made of pairs")
    return pair


def _require_plain(loaded: object) -> None:
    """Raise ValueError for what contains itself, lies too deep, or would unfold to too much when it is walked through.

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
            sizes[key] = min(1 + sum(sizes.get(id(child), 1) for child in children), _MOST_CONTAINERS**2)
            held += len(children)
        elif key in open_:
            if not isinstance(found, Stub):  # objects may know each other; nothing here walks through them
                raise ValueError("holds a pickle of something that contains itself")
        elif children and key not in sizes:
            open_.add(key)
            if len(open_) > _DEEPEST:
                raise ValueError(f"holds a pickle that is nested more than {_DEEPEST} deep")
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
