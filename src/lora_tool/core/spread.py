"""Where work is done, as it is asked for: on this machine, or on a Ray cluster that runs already."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.core.choices import Choice
from lora_tool.core.errors import WrongValue

if TYPE_CHECKING:
    from lora_tool.core.cluster.ray_cluster import RayCluster


@enum.unique
class EngineName(Choice):
    """What does the work."""

    LOCAL = "local"
    """This machine's cores."""
    RAY = "ray"
    """The nodes of a Ray cluster, over storage that all of them share."""


class Spread(Struct, frozen=True, kw_only=True):
    """The engine, and of a Ray cluster its address and how many tasks it does at a time.

    Raises `WrongValue` for an address or workers of this machine.
    """

    engine: EngineName = EngineName.LOCAL
    address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.engine is EngineName.LOCAL:
            for name, given in (("address", self.address), ("workers", self.workers)):
                if given is not None:
                    raise WrongValue(
                        f"`{name}` applies only to a Ray cluster, but this machine does the work",
                        hint='`engine="ray"` does the work on the cluster',
                    )

    @property
    def cluster(self) -> RayCluster | None:
        """The cluster, None where this machine does the work."""
        if self.engine is EngineName.LOCAL:
            return None
        from lora_tool.core.cluster.ray_cluster import RayCluster  # only where it is asked for

        return RayCluster(address=self.address or "auto", workers=self.workers)

    def require(self) -> None:
        """Return if the engine can be had: asked before hours of work. Raises as `RayCluster.require`."""
        if self.cluster is not None:
            self.cluster.require()


HERE = Spread()
"""This machine."""


def spread_over(engine: EngineName | str, address: str | None, workers: int | None) -> Spread:
    """Return where the work is done, once its engine is known to be there. Raises as `Spread` and `Spread.require`."""
    spread = Spread(engine=EngineName(engine), address=address, workers=workers)
    spread.require()
    return spread
