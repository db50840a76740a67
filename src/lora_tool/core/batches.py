"""Cutting much small work into batches that are worth handing to a thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What has a size in bytes."""

    @property
    def nbytes(self) -> int: ...


_Item = TypeVar("_Item", bound=Sized)


def batches_of_bytes(items: Iterable[_Item], nbytes: int) -> Iterator[tuple[_Item, ...]]:
    """Yield neighbouring items together until they have `nbytes` bytes, the rest last.

    To hand out thousands of small items one by one takes longer than their work does.
    """
    batch: list[_Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += item.nbytes
        if held >= nbytes:
            yield tuple(batch)
            batch, held = [], 0
    if batch:
        yield tuple(batch)
