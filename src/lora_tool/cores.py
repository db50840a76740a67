"""How many cores this process may use: fewer than the machine has in a container, or under `taskset`."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return how many cores this process may use, at least one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
