"""Memory that is used again: the system clears the pages of new memory, which can take longer than to fill it."""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_tool.cores import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 64
"""A line of the cache, and the widest vector."""


class Room:
    """One worker's arrays, each known by a name; not shared between threads."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def of(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, like: int | None = None) -> NDArray[Any]:
        """Return the array of that name, whose elements are any; it is valid until the next of the name.

        Its address is that of a vector, or differs from an offset `like` it by whole pages.
        """
        needed = math.prod(shape) * dtype.itemsize
        held = self._held.get(name)
        if held is None or held.nbytes < needed + PAGE:
            # not numpy's own: of what a thread has freed, the C library keeps megabytes for others that never take them
            held = self._held[name] = np.frombuffer(mmap.mmap(-1, needed + PAGE), np.uint8)
        at = -held.ctypes.data % _ALIGNMENT if like is None else (like - held.ctypes.data) % PAGE
        return held[at : at + needed].view(dtype).reshape(shape)
