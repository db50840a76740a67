"""Words of closed lists: a wrong one is an error that names it, the list, and the closest word of the list."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable
from typing import NoReturn

from lora_tool.core.errors import WrongValue


class TextEnum(str, enum.Enum):
    """The base of enums whose members are printed as their values."""

    def __str__(self) -> str:
        return str(self.value)


class Choice(TextEnum):
    """The base of enums that users choose from. Upper and lower case, `_` and `-` make no difference."""

    @classmethod
    def _missing_(cls, value: object) -> Choice:
        """Return the member that `value` spells otherwise. Raises `WrongValue`."""
        word = _folded(value)
        found = next((member for member in cls if _folded(member.value) == word), None)
        if found is None:
            what = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()
            raise wrong_value(what, value, [str(member) for member in cls])
        return found


def wrong_value(what: str, value: object, known: Iterable[str]) -> WrongValue:
    """Return the error for a `value` of `what`, such as "task", that is not one of `known`."""
    listed = list(known)
    hint = closest(str(value), listed)
    return WrongValue(f"{what}: expected one of {', '.join(listed)}, found {value!r}", hint=hint and f"{hint!r}?")


def closest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the one of `known` that `word` most resembles, None where none has this `likeness`, at most 1, to it."""
    import difflib  # only for what is misspelled

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "Did you mean …?" with the closest of `known`, or all of them where none is close."""
    listed = list(known)
    found = closest(word, listed)
    return f"Did you mean {found!r}?" if found else f"Known: {', '.join(listed)}."


def _folded(value: object) -> str:
    return str(value).lower().replace("_", "-")


_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B?|B)?\Z", re.IGNORECASE)


def number_of_bytes(value: object) -> int:
    """Return a size such as ``5GB``, ``500MiB`` or 1000000 in bytes. Raises `WrongValue`."""
    match = _SIZE.match(str(value).strip())
    unit = (match["unit"] or "B").upper() if match else ""
    step = 1024 if "I" in unit else 1000
    nbytes = int(float(match["number"]) * step ** "BKMGT".index(unit[0])) if match else 0
    if nbytes < 1:
        raise WrongValue(f"size: expected a number of bytes such as 5GB or 500MiB, found {value!r}")
    return nbytes


def positive(value: object) -> int:
    """Return an int of at least 1. Raises `WrongValue` for everything else."""
    if type(value) is not int or value < 1:
        raise WrongValue(f"number: expected a whole number of at least 1, found {value!r}")
    return value


def count(value: object) -> int:
    """Return an int of at least 0. Raises `WrongValue` for everything else."""
    if type(value) is not int or value < 0:
        raise WrongValue(f"number: expected a whole number of at least 0, found {value!r}")
    return value


def fraction(value: object) -> float:
    """Return a number above 0 and up to 1. Raises `WrongValue` for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise WrongValue(f"number: expected a number above 0 and up to 1, found {value!r}")
    return float(value)


def proportion(value: object) -> float:
    """Return a number from 0 to 1. Raises `WrongValue` for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise WrongValue(f"number: expected a number from 0 to 1, found {value!r}")
    return float(value)


def above_zero(value: object) -> float:
    """Return a finite number above 0. Raises `WrongValue` for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise WrongValue(f"number: expected a number above 0, found {value!r}")
    return float(value)


def codes(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return codes of rules, or their beginnings: a list of them, or one text with commas between."""
    return tuple(code.strip() for code in (value.split(",") if isinstance(value, str) else value) if code.strip())


def flag(value: object) -> bool:
    """Return True or False. Raises `WrongValue` for everything else: "no" would be true."""
    if not isinstance(value, bool):
        raise WrongValue(f"flag: expected True or False, found {value!r}")
    return value


# The end of a `match` that must know every case: mypy reports what may arrive here.


def assert_never(value: NoReturn) -> NoReturn:
    """Raise `AssertionError`: `value` is of a kind that the `match` above forgot. `typing` has it since Python 3.11."""
    raise AssertionError(f"{type(value).__name__} is not handled")
