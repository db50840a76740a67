"""What Ray runs on the nodes: a task with its report, the question what a node lacks, and the meter of all tasks."""

from __future__ import annotations

import errno
import platform
import time
from typing import TYPE_CHECKING, Any

from lora_tool.core.errors import ExecutionError, LoraToolError
from lora_tool.core.tasks import ClusterTask, Surroundings

if TYPE_CHECKING:
    import ray

_REPORT_BYTES = 32 << 20
_LOST = frozenset({errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN})
"""What network storage answers for a moment, and not when it is asked again."""

Place = tuple[int, int]
"""Where a task is: the place of its group, and its own in that."""


class Meter:
    """Adds up what the tasks report: an actor beside the one who waits for them."""

    def __init__(self) -> None:
        self._done: dict[Place, int] = {}

    def begin(self, place: Place) -> None:
        """Start a task from nothing, be it again."""
        self._done[place] = 0

    def add(self, place: Place, nbytes: int) -> None:
        """Add bytes of a task."""
        self._done[place] = self._done.get(place, 0) + nbytes

    def read(self) -> dict[Place, int]:
        """Return the bytes of each task."""
        return self._done


def enter(surroundings: Surroundings) -> LoraToolError | None:
    """Return what a task would lack on this node."""
    try:
        surroundings.enter(_this_node())
    except LoraToolError as fault:
        return fault
    return None


def carry_out(
    task: ClusterTask,
    surroundings: Surroundings,
    meter: ray.actor.ActorHandle[Meter],
    place: Place,
) -> tuple[str, Any, str]:
    """Return this node's name, the task's result or the error of the work, and why it has to be done again."""
    node = _this_node()
    waiting = 0
    last = time.monotonic()

    def report(nbytes: int) -> None:
        nonlocal waiting, last
        waiting += nbytes
        if waiting >= _REPORT_BYTES or time.monotonic() - last > 1:
            meter.add.remote(place, waiting)
            waiting, last = 0, time.monotonic()

    meter.begin.remote(place)
    try:
        surroundings.enter(node)
        return node, task.run(report), ""
    except (LoraToolError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno in _LOST:
            return node, None, str(error)
        return node, error, ""
    except MemoryError:
        return node, ExecutionError("out of memory", hint="`workers=N`: fewer tasks at a time need less"), ""


def _this_node() -> str:
    """Return what the node is called that this runs on."""
    import ray  # it runs inside Ray

    return f"{platform.node()} ({ray.util.get_node_ip_address()})"
