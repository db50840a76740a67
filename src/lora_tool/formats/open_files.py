"""Files that are open for reading: never more at once than the system allows, with room to spare."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lora_tool.core.errors import SourceChanged
from lora_tool.formats.files import read_pieces, read_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self


_MOST_OPEN = 256


def _ended(path: Path, at: int) -> SourceChanged:
    return SourceChanged(f"{path} was truncated at byte {at} while it was read")


def opened(path: Path) -> int:
    """Return a read-only descriptor of a file that was read before, for the caller to close. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO in its place would not block


class _Open(Struct):
    """An open file, and how many readers are reading from it right now."""

    descriptor: int
    readers: int = 0


class OpenFiles:
    """Files by path, opened with `opener` when they are read and closed when others need the room.

    A context manager, safe for threads.
    """

    def __init__(self, opener: Callable[[Path], int]) -> None:
        self._opener = opener
        self._held: OrderedDict[Path, _Open] = OrderedDict()
        self._lock = threading.Lock()
        # a checkpoint of 1000 ranks has more files than a process may open
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = _MOST_OPEN if allowed == resource.RLIM_INFINITY else max(4, min(_MOST_OPEN, allowed // 4))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def descriptor(self, path: Path) -> Iterator[int]:
        """Yield a descriptor of `path`, which stays open at least as long. Raises what opening it raises."""
        with self._lock:
            held = self._held.get(path)
            if held is None:
                self._make_room()
                held = self._held[path] = _Open(self._opener(path))
            self._held.move_to_end(path)
            held.readers += 1
        try:
            yield held.descriptor
        finally:
            with self._lock:
                held.readers -= 1

    def read_exactly(self, path: Path, offset: int, *buffers: memoryview) -> None:
        """Fill the buffers, one after the other, with the bytes of `path` from `offset`.

        Raises `SourceChanged` where it ends before.
        """
        with self.descriptor(path) as descriptor:
            done = read_rows(path, descriptor, offset, buffers)
        if done < sum(map(len, buffers)):
            raise _ended(path, offset + done)

    def read_pieces(self, path: Path, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes of `path` from its offset. Raises as `read_exactly`."""
        with self.descriptor(path) as descriptor:
            end = read_pieces(path, descriptor, pieces)
        if end is not None:
            raise _ended(path, end)

    def _make_room(self) -> None:
        """Close the files that were read longest ago, as far as nobody reads from them."""
        if len(self._held) < self._limit:
            return
        idle = [path for path, held in self._held.items() if not held.readers]
        for path in idle[: len(self._held) + 1 - self._limit]:
            os.close(self._held.pop(path).descriptor)

    def held(self) -> dict[Path, int]:
        """Return the files that are open now, with their descriptors."""
        with self._lock:
            return {path: held.descriptor for path, held in self._held.items()}

    def close(self) -> None:
        """Close all of them."""
        while self._held:
            os.close(self._held.popitem()[1].descriptor)


# Memory that is used again: the system clears the pages of new memory, which can take longer than to fill it.


class PageBuffer:
    """Memory straight from the system: the C library would keep megabytes that a thread freed, and no thread reuses."""

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
        import numpy as np  # not needed for copying files

        buffer = self._buffers[name].of(math.prod(shape) * dtype.itemsize)
        return np.ndarray(shape, dtype, buffer=buffer)
