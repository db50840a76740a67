"""Bytes that a plan carries outside of memory: the small matrices of hundreds of modules are not small together."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property


class Aside:
    """A temporary file without a name, which the system removes with the last of its bytes. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end = 0

    @cached_property
    def descriptor(self) -> int:
        """That of the file. Raises `OSError` where no temporary file can be made."""
        import tempfile  # few plans carry that much

        with tempfile.TemporaryFile(prefix="lora-tool-") as file:
            descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def put(self, data: bytes) -> bytes | Carried:
        """Return what stands for the bytes: themselves where no file can hold them."""
        with suppress(OSError), self._lock:
            done = 0
            while done < len(data):
                done += os.pwrite(self.descriptor, data[done:], self._end + done)
            self._end += done
            return Carried(self, self._end - done, done)
        return data


class Carried:
    """Bytes in such a file, which are read each time. They are equal to the same bytes, and pickled as them."""

    __slots__ = ("_aside", "_nbytes", "_offset")

    def __init__(self, aside: Aside, offset: int, nbytes: int) -> None:
        self._aside, self._offset, self._nbytes = aside, offset, nbytes

    def __bytes__(self) -> bytes:
        data = os.pread(self._aside.descriptor, self._nbytes, self._offset)
        if len(data) < self._nbytes:
            raise OSError("a temporary file was truncated")
        return data

    def __len__(self) -> int:
        return self._nbytes

    def __eq__(self, other: object) -> bool:
        return bytes(self) == bytes(other) if isinstance(other, bytes | Carried) else NotImplemented

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __reduce__(self) -> tuple[Callable[[bytes], bytes], tuple[bytes]]:
        return bytes, (bytes(self),)
