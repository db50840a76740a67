"""The door for packages that draw: an entry point of the group `lora_tool.pictures` names a `Drawer`."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from lora_tool.core.doors import PICTURES, entry_points, load
from lora_tool.core.errors import MissingDependency


class Drawer(Struct, frozen=True, kw_only=True):
    """What draws, to a file whose name says what it becomes: .png, .svg, .pdf or .html; a name without an ending is that
    of a folder, which gets a file for each picture.

    Each picture raises `ExecutionError`, and `NotACheckpoint` where there is nothing to draw.
    """

    require: Callable[[], None]
    """Returns if all that drawing needs is installed; called before anything is read. Raises `MissingDependency`."""
    checkpoint: Callable[..., None]
    """Takes a checkpoint, the path, the `base` or None, and the `facts` that `inspect` prints."""
    comparison: Callable[..., None]
    """Takes a `Comparison`, the path, and the `names` of the two checkpoints."""
    margins: Callable[..., None]
    """Takes a title, the `PairEvidence` of a reward model, and the path."""


def drawer() -> Drawer:
    """Return the first installed drawer, which has what it needs. Raises `MissingDependency`, `BrokenPlugin`."""
    point = next(iter(entry_points(PICTURES).values()), None)
    if point is None:
        raise MissingDependency("a package that draws", extra="plot")
    found = load(point, Drawer)
    found.require()
    return found
