"""Frozen dataclasses that cost little to define: their methods are made when they are needed.

`dataclasses` writes the source of six methods of a frozen class, and compiles them, when the class is defined: half a
millisecond, which 160 classes spent before a command read its first file. Here the standard library makes the fields and
the slots, and nothing is compiled but the `__init__` of a class that is used. `fields`, `replace`, `asdict`, `copy` and
`pickle` know no difference.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - type checkers read the classes as what they are
else:

    def dataclass(*, frozen: bool = False, eq: bool = True, repr: bool = True, **how: bool) -> Callable[[type], type]:  # noqa: A002 - its names
        """Return the decorator `dataclasses.dataclass` for these arguments; frozen classes are as it makes them."""
        if not frozen:
            return dataclasses.dataclass(eq=eq, repr=repr, **how)

        def made(cls: type) -> type:
            explicit_hash = cls.__dict__.get("__hash__") is not None
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, **how)(cls)
            own = cls.__dict__
            cls.__setattr__, cls.__delattr__ = _refuse_to_set, _refuse_to_delete
            if "__init__" not in own:
                cls.__init__ = _Constructor(cls)
            if repr and "__repr__" not in own:
                cls.__repr__ = _repr
            if eq and "__eq__" not in own:
                cls.__eq__ = _equality(cls)
            if eq and not explicit_hash:
                cls.__hash__ = _hash(cls)
            if how.get("slots"):
                cls.__getstate__, cls.__setstate__ = _state, _restore
            return cls

        return made


class _Made:
    """The default of a parameter whose value a factory makes."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE = _Made()


class _Constructor:
    """The `__init__` of a class, made when it is first asked for, which puts it in this one's place."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type | None = None) -> Any:  # noqa: ANN401 - a function or a method
        init = _init(self._cls)
        self._cls.__init__ = init  # type: ignore[misc]
        return init.__get__(instance, owner)


def _init(cls: type) -> Any:  # noqa: ANN401 - a function, whose parameters are the fields
    """Return the function that sets the fields from arguments of their names."""
    fields = dataclasses.fields(cls)
    given = [each for each in fields if each.init]
    by_place = [_parameter(each) for each in given if not each.kw_only]
    by_name = [_parameter(each) for each in given if each.kw_only]
    parameters = ", ".join(["self", *by_place, *(["*", *by_name] if by_name else [])])
    lines = [f"__set(self, {each.name!r}, {value})" for each in fields if (value := _value(each, cls)) is not None]
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    names: dict[str, Any] = {"__set": object.__setattr__, "__made": _MADE}
    for each in fields:
        names |= {f"default_{each.name}": each.default, f"factory_{each.name}": each.default_factory}
    body = "\n  ".join(lines or ["pass"])
    source = f"def make({', '.join(names)}):\n def __init__({parameters}):\n  {body}\n return __init__"
    local: dict[str, Any] = {}
    exec(source, vars(sys.modules[cls.__module__]), local)  # noqa: S102 - as `dataclasses` does; the module's names are for its annotations
    init = local["make"](**names)
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {each.name: each.type for each in given} | {"return": None}
    return init


def _parameter(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"{field.name}=default_{field.name}"
    return field.name if field.default_factory is MISSING else f"{field.name}=__made"


def _value(field: Field[Any], cls: type) -> str | None:
    """Return the expression of what a field is set to; None where the class has it already, or nobody sets it here."""
    if field.default_factory is not MISSING:
        make = f"factory_{field.name}()"
        return f"{make} if {field.name} is __made else {field.name}" if field.init else make
    if field.init:
        return field.name
    has_slot = field.default is not MISSING and hasattr(cls, "__slots__")
    return f"default_{field.name}" if has_slot else None


@recursive_repr()
def _repr(self: Any) -> str:  # noqa: ANN401 - any of the classes
    shown = (f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _equality(cls: type) -> Callable[[object, object], bool]:
    values = _values([each.name for each in dataclasses.fields(cls) if each.compare])

    def __eq__(self: object, other: object) -> bool:  # noqa: N807 - what it becomes
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(cls: type) -> Callable[[object], int]:
    hashed = [each for each in dataclasses.fields(cls) if (each.compare if each.hash is None else each.hash)]
    values = _values([each.name for each in hashed])

    def __hash__(self: object) -> int:  # noqa: N807 - what it becomes
        return hash(values(self))

    return __hash__


def _values(names: Sequence[str]) -> Callable[[object], tuple[Any, ...]]:
    """Return what reads the attributes, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda each: tuple(getattr(each, name) for name in names)


def _refuse_to_set(_: object, name: str, __: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_: object, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:  # noqa: ANN401 - any of the classes
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _restore(self: Any, state: Sequence[Any]) -> None:  # noqa: ANN401 - any of the classes
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
