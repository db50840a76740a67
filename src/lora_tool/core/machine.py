"""What this process has of the machine: cores, fewer in a container or under `taskset`; and batches of work for them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

_M_ARENA_MAX = -8
CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, _quotas())]))


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
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _quotas() -> Iterator[float]:
    """Yield the share of cores that the container may use, where it is bounded: `docker run --cpus`, Kubernetes."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", or no number at all
        quota, period = (CONTROL_GROUP / "cpu.max").read_text(encoding="ascii").split()
        yield int(quota) / max(1, int(period))
    with contextlib.suppress(OSError, ValueError):
        first = CONTROL_GROUP / "cpu"  # of the first version of control groups
        quota = (first / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (first / "cpu.cfs_period_us").read_text(encoding="ascii")
        if int(quota) > 0:
            yield int(quota) / max(1, int(period))


class Sized(Protocol):
    """What has a size in bytes."""

    @property
    def nbytes(self) -> int: ...


_Item = TypeVar("_Item", bound=Sized)


def batches_of_bytes(items: Iterable[_Item], nbytes: int) -> Iterator[tuple[_Item, ...]]:
    """Yield neighbouring items together until they have `nbytes` bytes, the rest last.

    To hand out thousands of small items one by one takes longer than their work does.
    """
    batch: list[_Item] = []
    held = 0
    for item in items:
        batch.append(item)
        held += item.nbytes
        if held >= nbytes:
            yield tuple(batch)
            batch, held = [], 0
    if batch:
        yield tuple(batch)


# Subnormal numbers and rounding in this thread, whatever mode another library has set: torch and -ffast-math can.


_ENVIRONMENT_BYTES = 256
"""More than any `fenv_t`."""


@contextlib.contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Keep subnormal numbers and round to nearest, ties to even, inside; the thread's own mode comes back after.

    Nothing is changed where the C library does not tell how: elsewhere than on Linux and macOS, x86-64 and arm64.
    """
    found = _c_library()
    if found is None:
        yield
        return
    get, put, default = found
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    get(before)
    put(default)
    try:
        yield
    finally:
        put(before)


@lru_cache
def _c_library() -> tuple[Callable[..., int], Callable[..., int], ctypes.c_void_p] | None:
    """Return C's `fegetenv` and `fesetenv`, and its FE_DFL_ENV, which has flush-to-zero off (C11, 7.6)."""
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return None
    try:
        library = ctypes.CDLL(None)
        get, put = library.fegetenv, library.fesetenv
        of_macos = ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV")) if sys.platform == "darwin" else None
    except (OSError, AttributeError, ValueError):
        return None
    return get, put, ctypes.c_void_p(of_macos or -1)  # glibc and musl have -1
