"""Writing past the page cache, for folders that do not fit in memory beside what they are made of.

What is written goes by way of the page cache, where it takes the place of inputs that are yet to be read, and waits for
the disk to make room. With O_DIRECT, whole pages go to the disk from where they were computed: that saves copying them,
too, but whoever reads them next reads the disk. So it is only done where they would not have stayed in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lora_tool.machine import CONTROL_GROUP, PAGE

MOUNTS = Path("/proc/self/mountinfo")
_ON_A_DISK = frozenset({"ext4", "xfs"})
"""File systems that write past the page cache at the speed of the disk: over a network each write waits for the server."""


class PastCache(int):
    """The descriptor of a file, and the `direct` one of the same file, whose writes go past the page cache."""

    direct: int

    def write_pages(self, data: memoryview, offset: int) -> int:
        """Write `data` at `offset` as far as its whole pages go; return how many bytes were written.

        The system takes only data whose address and offset differ by whole pages, and not on every file system.
        """
        head = -offset % PAGE
        pages = (len(data) - head) // PAGE * PAGE
        if pages <= 0:
            return 0
        done = os.pwrite(self, data[:head], offset) if head else 0
        with contextlib.suppress(OSError):  # a real error comes again, when the rest is written
            while head <= done < head + pages:
                done += os.pwrite(self.direct, data[done : head + pages], offset + done)
        return done


def past_cache(path: Path, descriptor: int) -> int:
    """Return the `descriptor` of `path`, one that writes past the page cache where that is worth it."""
    try:
        if not hasattr(os, "O_DIRECT") or _file_system(os.fstat(descriptor).st_dev) not in _ON_A_DISK:
            return descriptor
        direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return descriptor
    found = PastCache(descriptor)
    found.direct = direct
    return found


def _file_system(device: int) -> str:
    """Return the type of the file system on a device, "" where it is not mounted as one."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for mount in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = mount.partition(" - ")  # proc_pid_mountinfo(5)
        if fields.split(" ")[2] == number:
            return rest.split(" ")[0]
    return ""


def exceeds_memory(nbytes: int) -> bool:
    """Return whether files of so many bytes, and others of the same size that they are made of, do not fit in memory."""
    return 2 * nbytes > min(_memories(), default=2 * nbytes)


def _memories() -> Iterator[int]:
    """Yield how much memory the machine has, and how much the container may use where that is bounded."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the system has no such name
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for bound in ("memory.max", "memory/memory.limit_in_bytes"):  # of both versions of control groups
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            yield int((CONTROL_GROUP / bound).read_text(encoding="ascii"))
