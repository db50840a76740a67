"""A share of some work, as a job of a Slurm array or of Kubernetes is given one: ``3/8``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from msgspec import Struct

from lora_tool.core.errors import WrongValue

_Item = TypeVar("_Item")

_SPELLED = re.compile(r"(?P<number>\d{1,9})/(?P<of>\d{1,9})\Z")


class Share(Struct, frozen=True, kw_only=True):
    """Part `number` of `of` parts of some work, counted from 1. ``str`` gives the form that `--part` takes: ``3/8``."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def among(self, items: Sequence[_Item]) -> tuple[_Item, ...]:
        """Return those of `items` that are this share; together all shares are all of them, each once."""
        return tuple(items[self.number - 1 :: self.of])


def share(text: object) -> Share:
    """Return the share that "3/8" names. Raises `WrongValue`."""
    match = _SPELLED.match(str(text))
    if match is None or not 1 <= int(match["number"]) <= int(match["of"]):
        raise WrongValue(f"part: expected I/N such as 3/8, with I from 1 to N, found {text!r}")
    return Share(number=int(match["number"]), of=int(match["of"]))
