"""One weights file that is being written: opened when its first unit is, closed when it is on the disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from lora_tool.execution.units import Unit
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.steps import Shard

_MOST_OPEN = 8
_PATIENCE_S = 0.1
_SMALL_WRITE = 1 << 16
"""What Python writes at a time: for more, Linux may take memory that nothing has touched yet."""


def slots_for(jobs: int) -> threading.Semaphore:
    """Return what bounds how many files of one folder are open for writing at once: one for every worker, and some that
    are complete, and flushed while the next are written.
    """
    return threading.Semaphore(max(_MOST_OPEN, jobs + 1))


Sample = tuple[str, int, DeltaRetention]
"""Output tensor, where in the file its unit begins, and what rounding left of the change there."""


class ShardFile:
    """A new file of its final size with its header written, in `batches` batches of units. Safe to write to from threads.

    No thread that holds one of the `slots` waits for another file: the threads that opened a file write it, and it is
    flushed when it is complete, in any order.
    """

    def __init__(self, folder: Path, shard: Shard, *, batches: int, slots: threading.Semaphore) -> None:
        self.path = folder / shard.filename
        self.shard = shard
        self.samples: list[Sample] = []
        """The workers' notes on their units."""
        self._missing = batches
        self._slots = slots
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def open(self, stop: threading.Event) -> bool:
        """Open the file if it is not open, which makes it appear; return False if the run was stopped meanwhile."""
        with self._lock:
            while self._descriptor is None:
                if stop.is_set():
                    return False
                if self._slots.acquire(timeout=_PATIENCE_S):
                    try:
                        self._descriptor = self._created()
                    except BaseException:
                        self._slots.release()
                        raise
        return True

    @property
    def descriptor(self) -> int:
        """What units are written to, once it is open."""
        if self._descriptor is None:
            raise AssertionError(f"{self.path} is not open")
        return self._descriptor

    def _created(self) -> int:
        header = self.shard.header
        out = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            give_size(out, len(header) + self.shard.data_bytes)
            write_exactly(out, memoryview(header), 0)
        except BaseException:
            os.close(out)
            raise
        return out

    def start_writing_back(self, batch: Sequence[Unit]) -> None:
        """Start writing neighbouring units to the disk without waiting, so that flushing finds little left to do."""
        if hasattr(os, "posix_fadvise"):
            nbytes = batch[-1].begin + batch[-1].nbytes - batch[0].begin
            with contextlib.suppress(OSError):  # advice, which a file system need not take
                os.posix_fadvise(self.descriptor, batch[0].begin, nbytes, os.POSIX_FADV_DONTNEED)

    def end(self) -> bool:
        """Note that a batch is written, and return whether it was the last."""
        with self._lock:
            self._missing -= 1
            return self._missing == 0

    def flush(self) -> None:
        """Wait until all of it is on the disk, and close it. Raises `OSError`."""
        os.fsync(self.descriptor)
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                self._slots.release()


def give_size(out: int, nbytes: int) -> None:
    """Give an empty file its size, and its place on the disk where the file system can: writing into it costs less.

    A disk without that place is an `OSError` now, not when some of the file is written.
    """
    reserve = _fallocate()
    if reserve is not None and nbytes and reserve(out, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))
    os.ftruncate(out, nbytes)


@lru_cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """Return Linux's call: where a file system cannot do it, that of POSIX (`os.posix_fallocate`) writes every block."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    found: Callable[[int, int, int, int], int] = call
    return found


def write_exactly(out: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the descriptor `out` at `offset`."""
    done = 0
    while done < len(data):
        done += os.pwrite(out, data[done : done + _SMALL_WRITE], offset + done)


def added_up(samples: Iterable[Sample]) -> dict[str, DeltaRetention]:
    """Return the samples of one file added up by tensor, in the order of the file whoever took them."""
    total: dict[str, DeltaRetention] = {}
    for name, _, sample in sorted(samples, key=itemgetter(1)):
        total[name] = total.get(name, DeltaRetention()) + sample
    return total
