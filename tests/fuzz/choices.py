"""Decisions read off a string of bytes: whoever makes the bytes (hypothesis, a fuzzer, a seed) decides everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Choices:
    """Numbers and picks from `data`, front to back; zeros where it has ended, so that every string means something."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, bound: int) -> int:
        """Return a number of 0 to `bound` - 1."""
        width = max(1, ((bound - 1).bit_length() + 7) // 8)
        taken = self._data[self._at : self._at + width]
        self._at += width
        return int.from_bytes(taken, "little") % bound

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def bytes(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken.ljust(size, b"\0")
