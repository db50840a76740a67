"""The door for packages that draw: an entry point of the group `lora_tool.pictures` names a `Drawer`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from lora_tool.core.doors import PICTURES, entry_points, load
from lora_tool.core.errors import MissingDependency

if TYPE_CHECKING:
    from lora_tool.checkpoints import Checkpoint, ModelDir
    from lora_tool.rules.merged.pairs import PairEvidence
    from lora_tool.workflows.inspection.comparison import Comparison


class CheckpointPicture(Protocol):
    """Draws what a checkpoint holds."""

    def __call__(
        self, checkpoint: Checkpoint, path: Path, *, base: ModelDir | None, facts: Iterable[tuple[str, str]]
    ) -> object:
        """Write the picture to `path`; `facts` are what `inspect` prints. Raises `NotACheckpoint`, `ExecutionError`."""


class ComparisonPicture(Protocol):
    """Draws what differs between two checkpoints."""

    def __call__(self, comparison: Comparison, path: Path, *, names: tuple[str, str]) -> object:
        """Write the picture to `path`. Raises `NotACheckpoint`, `ExecutionError`."""


class MarginsPicture(Protocol):
    """Draws the margins of a reward model's pairs."""

    def __call__(self, title: str, found: PairEvidence, path: Path) -> object:
        """Write the picture to `path`. Raises `ExecutionError`."""


class Requirement(Protocol):
    """What must be installed."""

    def __call__(self) -> None:
        """Return if it is. Raises `MissingDependency`."""


class Drawer(Struct, frozen=True, kw_only=True):
    """What draws. A file's name says what it becomes: .png, .svg, .pdf or .html."""

    require: Requirement
    """Called before anything is read."""
    checkpoint: CheckpointPicture
    comparison: ComparisonPicture
    margins: MarginsPicture


def drawer() -> Drawer:
    """Return the first installed drawer, which has what it needs. Raises `MissingDependency`, `BrokenPlugin`."""
    point = next(iter(entry_points(PICTURES).values()), None)
    if point is None:
        raise MissingDependency("a package that draws", extra="plot")
    found = load(point, Drawer)
    found.require()
    return found
