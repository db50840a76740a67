"""Where work is done: on this machine, or on a cluster whose engine another package adds.

An engine does tasks (`lora_tool.core.tasks`), whatever they are for: the files of a plan are tasks of `execution`, their
comparison tasks of `verification`. An entry point of the group `lora_tool.engines` names a `ClusterEngine`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from lora_tool.core.choices import wrong_value
from lora_tool.core.doors import ENGINES, entry_points, load
from lora_tool.core.errors import WrongValue

if TYPE_CHECKING:
    from lora_tool.core.progress import Progress
    from lora_tool.core.tasks import Surroundings, TaskGroup

LOCAL = "local"
"""The engine that is built in: this machine's cores."""


class Connection(Protocol):
    """A cluster that takes tasks."""

    def require_nodes(self, surroundings: Surroundings) -> None:
        """Return if every node has what the tasks need, by `surroundings.enter(NAME)` on it. Raises what that raises."""

    def map(self, group: TaskGroup, *, progress: Progress) -> None:
        """Do the tasks, each on any node, once it has entered `group.surroundings`.

        Calls `group.done` with each result, in this process and by one thread at a time, and `progress` with the bytes.
        Raises the first error of a task, after all others have stopped.
        """


class Cluster(Protocol):
    """The nodes that an engine has found, or will find, at an address."""

    def require(self) -> None:
        """Return if the cluster can be reached: called before hours of work. Raises `MissingDependency`, `ExecutionError`."""

    def connected(self) -> AbstractContextManager[Connection]:
        """Enter with a connection to the cluster. Raises as `require`."""


class ClusterEngine(Struct, frozen=True, kw_only=True):
    """An engine that another package adds."""

    cluster: Callable[[str | None, int | None], Cluster]
    """Returns the cluster at an address, None for the engine's default, for a number of tasks at a time, None for its own.

    It opens no connection and imports nothing slow.
    """


class Spread(Struct, frozen=True, kw_only=True):
    """The engine that does the work, the address of its cluster and how many tasks that does at a time.

    Raises `WrongValue` for an address or workers of this machine.
    """

    engine: str = LOCAL
    address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.engine == LOCAL:
            for name, given in (("address", self.address), ("workers", self.workers)):
                if given is not None:
                    raise WrongValue(
                        f"`{name}` applies only to a cluster, but this machine does the work",
                        hint='`engine="NAME"` names the engine of the cluster',
                    )

    @property
    def cluster(self) -> Cluster | None:
        """The cluster, None where this machine does the work. Raises `BrokenPlugin`."""
        if self.engine == LOCAL:
            return None
        return load(entry_points(ENGINES)[self.engine], ClusterEngine).cluster(self.address, self.workers)

    def require(self) -> None:
        """Return if the cluster can be reached: called before hours of work. Raises as `cluster` and `Cluster.require`."""
        if self.cluster is not None:
            self.cluster.require()


HERE = Spread()
"""This machine."""


def engine_name(given: object) -> str:
    """Return the name of the built-in engine or of one that is installed. Raises `WrongValue` for any other."""
    name = str(given).lower()
    if name != LOCAL and name not in entry_points(ENGINES):
        raise wrong_value("engine", given, (LOCAL, *entry_points(ENGINES)))
    return name
