"""What this process has of the machine: cores, fewer in a container or under `taskset`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_M_ARENA_MAX = -8
CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(share) for share in _quotas())]))


def factor_workers() -> int:
    """Return how many threads make factors of factors, unless somebody asks for more: each takes 3 to 5 MB, and commands on
    adapters promise to take 70 MB on whatever machine.
    """
    return min(2, available_cores())


def one_arena() -> None:
    """Have all threads of this process take memory from one place, where the C library is glibc; nothing elsewhere.

    It keeps a place for each thread, and there megabytes that the thread has freed (mallopt(3), M_ARENA_MAX). For commands
    that promise to take little: it holds for everything in the process.
    """
    import ctypes  # for these commands alone

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _quotas() -> Iterator[float]:
    """Yield the share of cores that the container may use, where it is bounded: `docker run --cpus`, Kubernetes."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", or no number at all
        quota, period = (CONTROL_GROUP / "cpu.max").read_text(encoding="ascii").split()
        yield int(quota) / max(1, int(period))
    with contextlib.suppress(OSError, ValueError):
        first = CONTROL_GROUP / "cpu"  # of the first version of control groups
        quota, period = ((first / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / max(1, int(period))
