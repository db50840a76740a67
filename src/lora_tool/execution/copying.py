"""Copying bytes of the inputs: by the system where that is cheapest, else through a block of memory that stays in cache.

Linux copies within and between files itself (`copy_file_range`), as fast as `cp`, where both places have one position
in their pages. Elsewhere it copies every page in two halves, which takes twice as long as reading and writing a block
(measured on ext4); bytes of torch's archives are aligned to 64, not to a page. A server that copies its own files
spares the network, wherever they lie.
"""

from __future__ import annotations

import os
from functools import lru_cache
from mmap import PAGESIZE
from pathlib import Path

from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import CopyUnit, GatherUnit

_BLOCK_BYTES = 1 << 18
"""Small enough for the second-level cache, large enough that system calls cost nothing."""
_ON_SERVERS = frozenset({"nfs4", "cifs", "smb3", "ceph"})
"""File systems whose server can copy."""


class Copier:
    """Copies units with a block of memory of its own. Not shared between threads."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._block = bytearray()

    def copy(self, unit: CopyUnit, out: int) -> None:
        """Copy one stretch of a file to its place in the descriptor `out`. Raises `SourceChanged`, OSError."""
        held = self._sources.held_bytes(unit.source, unit.offset, unit.nbytes)
        if held is not None:
            write_exactly(out, held, unit.begin)
            return
        with self._sources.descriptor(unit.source) as source:
            done = _copied_by_the_system(unit, source, out) if _is_better_copied_there(unit, source) else 0
        while done < unit.nbytes:
            block = self._room(min(_BLOCK_BYTES, unit.nbytes - done))
            self._sources.read_exactly(unit.source, unit.offset + done, block)
            write_exactly(out, block, unit.begin + done)
            done += len(block)

    def gather(self, unit: GatherUnit, out: int) -> None:
        """Put bytes of a tensor that lie in pieces together, and write them. Raises `SourceChanged`, OSError."""
        gathered = self._room(unit.nbytes)
        self._sources.read_into(unit.source, unit.start, gathered)
        write_exactly(out, gathered, unit.begin)

    def _room(self, nbytes: int) -> memoryview:
        if len(self._block) < nbytes:
            self._block = bytearray(nbytes)
        return memoryview(self._block)[:nbytes]


def _is_better_copied_there(unit: CopyUnit, source: int) -> bool:
    return (unit.offset - unit.begin) % PAGESIZE == 0 or _file_system(os.fstat(source).st_dev) in _ON_SERVERS


@lru_cache
def _file_system(device: int) -> str:
    """Return what Linux calls the file system on a device, "" where it does not say."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    # `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`, see proc_pid_mountinfo(5)
    found = (line.partition(" - ")[2].split(" ", 1)[0] for line in mounts if line.split(" ", 3)[2:3] == [wanted])
    return next(found, "")


def _copied_by_the_system(unit: CopyUnit, source: int, out: int) -> int:
    """Copy without passing through this process, and return how many bytes the system copied that way."""
    done = 0
    while hasattr(os, "copy_file_range") and done < unit.nbytes:
        try:
            count = os.copy_file_range(source, out, unit.nbytes - done, unit.offset + done, unit.begin + done)
        except OSError:
            break  # file systems, containers and old kernels refuse in various ways; a real error comes again, named
        if count == 0:
            break
        done += count
    return done
