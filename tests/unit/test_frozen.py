"""Frozen classes whose methods are made late, beside those that the standard library makes at once."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from types import SimpleNamespace
from typing import Any

import pytest

from lora_tool import frozen


def classes(of: Callable[..., Any], *, slots: bool) -> SimpleNamespace:
    """Return classes of every kind of field that this one and `dataclasses` have in common."""

    @of(frozen=True, slots=slots)
    class Place:
        at: float
        name: str = "here"

    @of(frozen=True, slots=slots, kw_only=True)
    class Base:
        """A base."""

        first: int
        names: list[str] = field(default_factory=list)
        hidden: float = field(default=0.5, repr=False, compare=False)

    @of(frozen=True, slots=slots, kw_only=True)
    class Derived(Base):
        made: int
        late: int = field(init=False)
        later: list[int] = field(init=False, default_factory=lambda: [1])
        zero: int = field(init=False, default=0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "late", self.made + self.first)

    @of(frozen=True, slots=slots, eq=False)
    class ByIdentity:
        at: int

    @of(frozen=True, slots=slots)
    class Hashed:
        at: int

        def __hash__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "mine"

    return SimpleNamespace(Place=Place, Base=Base, Derived=Derived, ByIdentity=ByIdentity, Hashed=Hashed)


def seen(made: SimpleNamespace) -> list[object]:
    """Return what can be seen of the classes and their objects."""
    place, nan = made.Place, float("nan")
    one, other = made.Derived(first=1, made=2, hidden=3.0), made.Derived(first=1, made=2)
    asked: list[Callable[[], object]] = [
        lambda: (repr(one), repr(place(1)), repr(made.Hashed(1)), repr(made.ByIdentity(1)).partition(".")[2]),
        lambda: (one == other, one == made.Derived(first=2, made=2), place(nan) == place(nan), place(1) == 1),
        lambda: made.ByIdentity(1) == made.ByIdentity(1),
        lambda: (hash(place(1)), hash(made.Hashed(1))),
        lambda: hash(one),
        lambda: (dataclasses.asdict(one), dataclasses.replace(one, first=5).late, place.__match_args__),
        lambda: (copy.deepcopy(one) == one, copy.copy(one).later, one.zero, one.later is other.later),
        lambda: [str(inspect.signature(each)) for each in (place, made.Base, made.Derived)],
        place,
        lambda: place(1, nothing=2),
        lambda: made.Base(1),
        lambda: setattr(one, "first", 1),
        lambda: delattr(one, "first"),
        lambda: vars(place(1)),
    ]
    return [answer(each) for each in asked]


def answer(asked: Callable[[], object]) -> object:
    try:
        return asked()
    except (TypeError, FrozenInstanceError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "dict"])
def test_frozen_classes_are_as_the_standard_library_makes_them(slots: bool) -> None:
    assert seen(classes(frozen.dataclass, slots=slots)) == seen(classes(dataclasses.dataclass, slots=slots))


@frozen.dataclass(frozen=True, slots=True)
class Found:
    at: int
    parts: tuple[Found, ...] = ()


def test_frozen_objects_go_to_other_processes() -> None:
    found = Found(1, (Found(2),))
    assert pickle.loads(pickle.dumps(found)) == found
