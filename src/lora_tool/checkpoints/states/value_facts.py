"""What reading the values of a checkpoint shows, as plain data: the rules LT411 to LT414 judge it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from lora_tool.core.progress import Progress
from lora_tool.core.tensors import DType

F = TypeVar("F")


class Damaged(Struct, frozen=True, kw_only=True, tag=True):
    """A record whose bytes are not those that were saved."""

    path: Path
    record: str
    """Its name in the archive."""
    crc: int
    """The CRC32 of its bytes."""
    saved_crc: int
    """The one in the archive's directory."""


class Unreadable(Struct, frozen=True, kw_only=True, tag=True):
    """A file that is damaged inside, although its directory is good."""

    path: Path
    why: str


class NotFinite(Struct, frozen=True, kw_only=True, tag=True):
    """A tensor that holds NaN or infinity."""

    path: Path
    name: str


class AllZero(Struct, frozen=True, kw_only=True, tag=True):
    """A file whose weights are all zero."""

    path: Path
    trained: bool
    """Whether only the trained ones are known to be zero."""


class NotRounded(Struct, frozen=True, kw_only=True, tag=True):
    """A master that does not round to the weight that was saved with it."""

    path: Path
    name: str
    copy: Path
    """The file of the weight."""
    dtype: DType
    same_step: bool
    """Whether both are known to be of one save."""
    by_zenflow: bool
    """Whether masters may be behind their weights."""


ValueFact = Damaged | Unreadable | NotFinite | AllZero | NotRounded


class ValueReader(Protocol):
    """Reads some of the values: plain data, which can be sent to any machine that sees the same files."""

    @property
    def name(self) -> str:
        """The thing that is read, for messages about failures."""

    @property
    def nbytes(self) -> int:
        """How many bytes it reports."""

    def run(self, advance: Progress) -> list[ValueFact]:
        """Read the values and return facts about them. `advance` gets the bytes read, and may raise to stop."""


class ValueFacts(Struct, frozen=True, kw_only=True):
    """What reading values has shown, for the rules about values."""

    facts: tuple[ValueFact, ...]

    def values(self, kind: type[F]) -> Iterator[F]:
        """Yield the facts of one kind."""
        return (fact for fact in self.facts if isinstance(fact, kind))
