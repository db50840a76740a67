"""Which tensors of a file are whole while others are being written: they can be read back meanwhile."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from lora_tool.execution.units import Unit, places_of
from lora_tool.formats.quantised.encodings import parts
from lora_tool.plans.core.factor_ops import Mix
from lora_tool.plans.core.requantise import Requantise
from lora_tool.plans.core.steps import Shard, Step

WORTH_BYTES, _MOST_TIMES = 128 << 20, 8
"""Bytes that are worth reading back together, and how often a file is read back: each time its header is, too."""

_Range = tuple[int, int]


class FinishedTensors:
    """The tensors of one file, each returned once, when its bytes are written. Not safe for threads."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._written: list[_Range] = []
        self._untold: dict[str, Step] | None = None
        self._since = 0
        self._worth = max(WORTH_BYTES, shard.data_bytes // _MOST_TIMES)

    def add(self, units: Iterable[Unit]) -> bool:
        """Note that the units are written; return whether much was since this last said so, which is worth a `take`."""
        ranges = [place for unit in units for place in places_of(unit)]
        self._written += ranges
        self._since += sum(end - begin for begin, end in ranges)
        if self._since < self._worth:
            return False
        self._since = 0
        return True

    def take(self, *, all_of_them: bool) -> tuple[Step, ...]:
        """Return the steps whose bytes are written and were not returned before; `all_of_them` without that test."""
        if self._untold is None:
            self._untold = {step.out.name: step for step in self._shard.steps}
        names = set(self._untold if all_of_them else self._whole())
        found = tuple(step for name, step in self._untold.items() if name in names)
        self._untold = {name: step for name, step in self._untold.items() if name not in names}
        return found

    def _whole(self) -> Iterator[str]:
        """Yield the names of tensors whose bytes, and those of their codes or scales, are all written."""
        self._written = _joined(self._written)
        begins = [begin for begin, _ in self._written]
        at, whole = len(self._shard.header), set()
        for step in self._shard.steps:
            under = bisect.bisect_right(begins, at) - 1
            if under >= 0 and at + step.out.nbytes <= self._written[under][1]:
                whole.add(step.out.name)
            at += step.out.nbytes
        for step in self._shard.steps:
            # products wait for the end: comparing them takes as much memory as writing them
            if not isinstance(step.op, Mix) and _compared_with(step) <= whole:
                yield step.out.name


def _compared_with(step: Step) -> set[str]:
    """Return the names of the tensors that must be whole before the step's output is compared."""
    match step.op:
        case Requantise():
            return {step.out.name, *(part.name for part in parts(step.op.encoding))}
        case _:
            return {step.out.name}


def _joined(ranges: Sequence[_Range]) -> list[_Range]:
    """Return the ranges in their order, those that touch as one."""
    found: list[_Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
