"""Memory that is used again: the system clears the pages of new memory, which can take longer than to fill it."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PageBuffer:
    """Memory of the system's own: of what a thread has freed, the C library keeps megabytes for others that never take
    them.
    """

    def __init__(self) -> None:
        self._held = memoryview(b"")

    def of(self, nbytes: int) -> memoryview:
        """Return `nbytes` bytes from the beginning of a page. They are valid until the next."""
        if not self._held or len(self._held) < nbytes:
            self._held = memoryview(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)))
        return self._held[:nbytes]


class Room:
    """One worker's arrays, each known by a name; not shared between threads."""

    def __init__(self) -> None:
        self._buffers: defaultdict[str, PageBuffer] = defaultdict(PageBuffer)

    def address(self, name: str, nbytes: int) -> int:
        """Return where so many bytes of that name lie, which are any; they are valid until the next of the name."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._buffers[name].of(nbytes)))

    def of(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the array of that name, whose elements are any; it is valid until the next of the name."""
        import numpy as np  # what copies files does without it

        buffer = self._buffers[name].of(math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer=buffer)
