"""Memory that is used again: the system clears the pages of new memory, which can take longer than to fill it."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lora_tool.machine import PAGE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PageBuffer:
    """Memory whose addresses can be like offsets in a file, as what is written past the page cache must be.

    It is the system's own: of what a thread has freed, the C library keeps megabytes for others that never take them.
    """

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def like(self, offset: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes, whose address and `offset` differ by whole pages. They are valid until the next."""
        if len(self._held) < PAGE + nbytes:
            self._held = memoryview(mmap.mmap(-1, PAGE + nbytes))
        return self._held[offset % PAGE :][:nbytes]


class Room:
    """One worker's arrays, each known by a name; not shared between threads."""

    def __init__(self) -> None:
        self._buffers: defaultdict[str, PageBuffer] = defaultdict(PageBuffer)

    def address(self, name: str, nbytes: int) -> int:
        """Return where so many bytes of that name lie, which are any; they are valid until the next of the name."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._buffers[name].like(0, nbytes)))

    def of(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, like: int | None = None) -> NDArray[Any]:
        """Return the array of that name, whose elements are any; it is valid until the next of the name.

        Its address is that of a page, or differs from an offset `like` it by whole pages.
        """
        import numpy as np  # what copies files does without it

        buffer = self._buffers[name].like(like or 0, math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer=buffer)
