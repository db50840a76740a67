"""The stack machine that pickles are programs for: it makes plain containers and inert objects, and calls nothing.

It is our own because the interpreter's machine, made safe in what it may call, can still be made to hang or to crash:
hashing a tuple of a tuple of a tuple takes time without end, or stack without end. Here every instruction costs about
the same, and the objects kept are counted. The instructions are those of CPython's `Lib/pickletools.py`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lora_tool.formats.pickle_objects import (
    ATTRIBUTE,
    BUILT_IN,
    DICT,
    MOST_DIMENSIONS,
    SET,
    Global,
    Known,
    Stub,
    name_of,
    stub_class,
)

DEEPEST = 200
MOST_CONTAINERS = 10_000_000
_MOST_MEMOIZED = 20_000_000
_MOST_NAMES = 10_000
"""Of different globals: a real checkpoint has about ten."""
_LONGEST_NAME = 1000
_LONGEST_NUMBER = 64
"""Bytes of a number: hashing a longer one takes as long as it is."""
_MOST_ODD_KEYS = 5_000
"""Of keys that one can choose so that they collide: large numbers and tuples. Text is hashed with a secret."""
_SMALL = 1 << 32
_LARGEST_KEY = 100
"""Elements of a tuple that is a key, with those of the tuples in it."""


class Refused(Exception):
    """The pickle's fault, as the end of a sentence."""


class Machine:
    """The stack machine. Each instruction costs about the same, whatever came before it."""

    most = MOST_CONTAINERS

    def __init__(self, data: bytes, known: Mapping[Global, Any], persistent: Callable[[Any], Any], at: int = 0) -> None:
        self._data, self._at, self.end = data, at, at
        """`end` is the byte behind the program, when it has run."""
        self.unknown: dict[Global, bool] = {}
        """The names without a meaning that were met so far, and whether they were called."""
        self._known, self._persistent = known, persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names: dict[Global, Any] = {}
        self._containers = self._odd_keys = 0

    def run(self) -> Any:  # noqa: ANN401, C901, PLR0912 - whatever the pickle says
        """Return the object on the stack at the program's STOP."""
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
                self.end = at
                return stack.pop()
            else:
                instruction = _INSTRUCTIONS.get(code)
                if instruction is None:
                    raise Refused(f"with the instruction 0x{code:02x} at byte {at - 1:,}, which no checkpoint needs")
                self._at = at
                instruction(self)
                at = self._at
        raise Refused("that ends without its STOP: truncated?")

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes of the program, and go on behind them."""
        self._at += count
        if self._at > len(self._data):
            raise Refused("that ends without its STOP: truncated?")
        return self._data[self._at - count : self._at]

    def _number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + _LONGEST_NAME)
        if end < 0:
            raise Refused("with a name that has no end")
        return self.take(end + 1 - self._at)[:-1].decode()

    # numbers and texts

    def push(self, value: object) -> None:
        self._stack.append(value)

    def integer(self, width: int, *, signed: bool = False) -> None:
        self._stack.append(int.from_bytes(self.take(width), "little", signed=signed))

    def long(self, width: int) -> None:
        size = self._number(width)
        if size > _LONGEST_NUMBER:
            raise Refused(f"with a number of {size:,} bytes, which no checkpoint needs")
        self.integer(size, signed=True)

    def double(self) -> None:
        self._stack.append(struct.unpack(">d", self.take(8))[0])

    def text(self, width: int, errors: str = "surrogatepass") -> None:
        self._stack.append(self.take(self._number(width)).decode("utf-8", errors))

    def binary(self, width: int) -> None:
        self._stack.append(self.take(self._number(width)))

    # the stack and the memo

    def mark(self) -> None:
        if len(self._marks) > DEEPEST * 10:
            raise Refused(f"that is nested more than {DEEPEST} deep")
        self._marks.append(len(self._stack))

    def taken(self, count: int | None = None) -> list[Any]:
        """Take the last `count` objects off the stack, by default all that lie above the last mark."""
        at = self._marks.pop() if count is None else len(self._stack) - count
        if at < 0:
            raise Refused("that takes more off its stack than it holds")
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def memoize(self) -> None:
        if len(self._memo) >= _MOST_MEMOIZED:
            raise Refused(f"of more than {_MOST_MEMOIZED:,} objects")
        self._memo[len(self._memo)] = self._stack[-1]

    # containers

    def _new(self, container: object) -> None:
        self._containers += 1
        if self._containers > self.most:
            raise Refused(f"of more than {self.most:,} objects")
        self._stack.append(container)

    def new(self, kind: Callable[[list[Any]], object], count: int | None = None) -> None:
        self._new(kind(self.taken(count)))

    def new_dict(self) -> None:
        items = self.taken()
        self._new({})
        self._put(items)

    def new_set(self) -> None:
        items = self.taken()
        self._new(set())
        self._add(items)

    def append(self, count: int | None = None) -> None:
        items, found = self.taken(count), self._stack[-1]
        if type(found) is list:
            found.extend(items)
        elif isinstance(found, Stub):
            found.items.extend(items)
        else:
            raise Refused("that appends to something that is not a list")

    def setitem(self, count: int | None = None) -> None:
        self._put(self.taken(count))

    def _put(self, items: Sequence[Any]) -> None:
        """Put alternating keys and values into the dictionary, or `Stub` of one, on the top of the stack."""
        found = self._stack[-1]
        if type(found) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) is not str:
                    self._require_key(key)
                found[key] = value
        elif isinstance(found, Stub):
            found.items.extend(zip(items[::2], items[1::2], strict=True))
        else:
            raise Refused("that sets items of something that is not a dictionary")

    def additems(self) -> None:
        self._add(self.taken())

    def _add(self, items: Iterable[Any]) -> None:
        found = self._stack[-1]
        if type(found) is not set:
            raise Refused("that adds to something that is not a set")
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

    # names, and the objects made with them

    def name(self) -> None:
        module = self._line()
        self._stack.append(self._named(module, self._line()))

    def stack_name(self) -> None:
        module, name = self.taken(2)
        if type(name) is not str or type(module) is not str:
            raise Refused("with a name that is not text")
        self._stack.append(self._named(module, name))

    def extension(self, width: int) -> None:
        self._stack.append(self._named("copyreg", f"_inverted_registry[{self._number(width)}]"))

    def _named(self, module: str, name: str) -> Any:  # noqa: ANN401 - a meaning or a Stub class
        key = (module, name)
        if key not in self._names:
            if len(self._names) > _MOST_NAMES:
                raise Refused(f"with more than {_MOST_NAMES:,} names of classes")
            if len(module) + len(name) > _LONGEST_NAME:
                raise Refused(f"with a name of {len(module) + len(name):,} characters")
            found = BUILT_IN.get(key) or self._known.get(key)
            if found is None:
                self.unknown[key] = False
            self._names[key] = stub_class(module, name) if found is None else found
        return self._names[key]

    def _attribute(self, of: Any, name: Any = None) -> None:  # noqa: ANN401
        if not name_of(of) or type(name) is not str:
            raise Refused(f"that asks for the attribute {name!r:.40} of {name_of(of)[:80] or 'something'}")
        module, outer = of.named
        self._stack.append(self._named(module, f"{outer}.{name}"))

    def instance(self) -> None:
        module = self._line()
        found = self._named(module, self._line())
        self._stack += (found, tuple(self.taken()))
        self.reduce()

    def new_object_with_keywords(self) -> None:
        self._stack.pop()
        self.reduce(calls=False)

    def reduce(self, *, calls: bool = True) -> None:
        what, args = self.taken(2)
        if type(args) is not tuple:
            raise Refused("that calls something without arguments")
        if isinstance(what, type) and issubclass(what, Stub):
            self.unknown[what.named] |= calls  # `__new__`, which only classes have, makes the new object
            self._new(what.made_with(args))
        elif what is ATTRIBUTE:
            self._attribute(*args[:2])
        elif what is DICT or what is SET:
            items: Sequence[Any] = args[0] if args else ()
            if type(items) not in (list, tuple):
                raise Refused("of a dictionary or set that is built from an unexpected value")
            # one long list can be given again and again
            self._containers += 10 * len(items)
            if what is DICT:
                self._new({})
                if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):  # noqa: PLR2004
                    raise Refused("of a dictionary that is not built from pairs")
                self._put([part for pair in items for part in pair])
            else:
                self._new(set())
                self._add(items)
        elif isinstance(what, Known):
            try:
                self._new(what.build(*args[: 2 * MOST_DIMENSIONS]))
            except ValueError as error:
                others = filter(None, (name_of(arg) or name_of(type(arg)) for arg in args[: 2 * MOST_DIMENSIONS]))
                raise ValueError(", not with ".join([str(error), *itertools.islice(others, 1)])) from error
        else:
            odd = name_of(type(what))
            raise Refused(f"that calls {f'an object of {odd}' if odd else 'something'}, neither a class nor a function")

    def build(self) -> None:
        state = self._stack.pop()
        found = self._stack[-1]
        if isinstance(found, Stub):
            found.state = state
        elif type(found) is not dict:  # the attributes of an ordered dictionary, `_metadata`, are of no use
            raise Refused("that sets the state of an object that cannot have one")

    def persistent(self) -> None:
        self._stack.append(self._persistent(self._stack.pop()))


_MARK, _STOP, _BININT1, _BINUNICODE = b"(.KX"
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = b"qrhj"
_INSTRUCTIONS: dict[int, Callable[[Machine], object]] = {
    0x80: partial(Machine.take, count=1),  # PROTO
    0x95: partial(Machine.take, count=8),  # FRAME
    ord("N"): partial(Machine.push, value=None),
    0x88: partial(Machine.push, value=True),
    0x89: partial(Machine.push, value=False),
    ord("M"): partial(Machine.integer, width=2),
    ord("J"): partial(Machine.integer, width=4, signed=True),
    0x8A: partial(Machine.long, width=1),
    0x8B: partial(Machine.long, width=4),
    ord("G"): Machine.double,
    # Python 2's texts, which may be anything
    ord("U"): partial(Machine.text, width=1, errors="surrogateescape"),
    ord("T"): partial(Machine.text, width=4, errors="surrogateescape"),
    0x8C: partial(Machine.text, width=1),
    0x8D: partial(Machine.text, width=8),
    ord("C"): partial(Machine.binary, width=1),
    ord("B"): partial(Machine.binary, width=4),
    0x8E: partial(Machine.binary, width=8),
    0x96: partial(Machine.binary, width=8),
    ord("0"): Machine.pop,
    ord("1"): Machine.taken,
    0x94: Machine.memoize,
    ord("]"): partial(Machine.new, kind=list, count=0),
    ord("l"): partial(Machine.new, kind=list),
    ord("a"): partial(Machine.append, count=1),
    ord("e"): Machine.append,
    ord("}"): partial(Machine.new, kind=dict, count=0),
    ord("d"): Machine.new_dict,
    ord("s"): partial(Machine.setitem, count=2),
    ord("u"): Machine.setitem,
    0x8F: partial(Machine.new, kind=set, count=0),
    0x90: Machine.additems,
    0x91: Machine.new_set,
    ord(")"): partial(Machine.push, value=()),
    ord("t"): partial(Machine.new, kind=tuple),
    0x85: partial(Machine.new, kind=tuple, count=1),
    0x86: partial(Machine.new, kind=tuple, count=2),
    0x87: partial(Machine.new, kind=tuple, count=3),
    ord("c"): Machine.name,
    ord("i"): Machine.instance,
    0x82: partial(Machine.extension, width=1),
    0x83: partial(Machine.extension, width=2),
    0x84: partial(Machine.extension, width=4),
    0x93: Machine.stack_name,
    ord("R"): Machine.reduce,
    0x81: partial(Machine.reduce, calls=False),  # NEWOBJ
    0x92: Machine.new_object_with_keywords,
    ord("b"): Machine.build,
    ord("Q"): Machine.persistent,
}
"""The opcodes of protocols 2 to 5 that `run` does not handle, and that of protocol 0 which has a name in it. DUP is left
out: only bombs need it, and no pickler writes it."""
