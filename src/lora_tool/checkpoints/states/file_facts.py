"""What readers find out about the files of a save, as plain data: the rules LT401 to LT409 compare it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from pathlib import Path

from msgspec import Struct


class NumberedFiles(Struct, frozen=True, kw_only=True):
    """Files that a save has once for each of `numbers`."""

    folder: Path
    one: str = "file"
    several: str = "files"
    """What one and more than one are called: "optimizer file"."""
    of: str = "rank"
    """The thing that the numbers count."""
    numbers: Sequence[int]
    there: Collection[int]
    """Those that exist, readable or not."""
    spare: bool = False
    """Whether the files that exist hold all that the others held."""


class FileFacts(Struct, frozen=True, kw_only=True):
    """What one rank file says about itself and its run. None: it does not say, or it means nothing here."""

    path: Path
    unit: str = "rank"
    """What one file is written for."""
    group: str = ""
    """Files with the same group should say the same."""
    archive: str | None = None
    """Name of the folder inside the file, which `torch.save` calls after the file."""
    rank: int | None = None
    """By the file's name."""
    saved_by: int | None = None
    """The rank, by the content."""
    ranks: int | None = None
    """How many ranks the file says that there were."""
    all_ranks: int = 0
    """How many ranks saved, by most files."""
    is_extra: bool = False
    """Whether the file lies there without being used."""
    step: float | None = None
    counts: str = ""
    """What `step` counts: "optimizer steps"."""
    config: Hashable = None
    names: Hashable = None
    """The names in it, in their order."""
    shapes: Hashable = None


class Amount(Struct, frozen=True, kw_only=True):
    """The number of elements in the files, against the number that the shapes need."""

    path: Path
    of: str
    unit: str = "element"
    over: int
    """How many more it holds than it should; negative: fewer."""
    needed_for: str = ""
    """As the end of a sentence."""
    subject: str | None = None
    """The parameter, if it is one parameter's."""


class SavedTags(Struct, frozen=True, kw_only=True):
    """The saves in a checkpoint, and the one that it points at."""

    root: Path
    names: tuple[str, ...]
    latest: str | None
    """The tag named in the file `pointer`; None without such a file."""
    pointer: str | None = "latest"
    """None for programs that write no such file."""
