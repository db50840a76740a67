"""Reading the values of a checkpoint: each byte that will be used is read once, in blocks.

Readers return facts as plain data, which the rules LT411 to LT414 judge.

The zip directory holds a CRC32 of every record, which no other tool compares. Padding is leftover memory and is read
only for the CRC.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from msgspec import Struct

from lora_tool.core.machine import available_cores
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import DType, Span
from lora_tool.formats.files import open_regular, read_into
from lora_tool.formats.torch_zip import Record

try:
    from isal.isal_zlib import crc32  # nine times as fast
except ImportError:  # pragma: no cover - a processor that it is not built for
    from zlib import crc32

T = TypeVar("T")

BLOCK_BYTES = 1 << 20
"""Read at a time, per worker: small enough that the second look at a block finds it in the second-level cache."""


class _Room(threading.local):
    """This thread's memory for a block: new memory for every file takes longer to come by than a block to read."""

    def __init__(self) -> None:
        self.buffer = bytearray(BLOCK_BYTES)


_ROOM = _Room()

_FEW_BYTES = 1 << 10

_NO_MATRIX = re.compile(r"bias\Z|norm|scale|gate\Z", re.IGNORECASE)
"""Tensors that may be all zero in a whole model: some norms have weights that are added to 1."""
_STARTS_AT_ZERO = re.compile(r"\.lora_B\.|\.lora_embedding_A\.|bias\Z")
"""Tensors that may be all zero in a rank's part: the learning rate of the first steps of a warm-up is 0."""


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


class ValuePiece(NamedTuple):
    """Bytes `begin` to `end` of a file, which belong to the tensor `name`."""

    begin: int
    end: int
    name: str
    dtype: DType


class FileValues(Struct, frozen=True, kw_only=True):
    """Reads the values in one file, a `ValueReader`."""

    path: Path
    records: tuple[Record | Span, ...]
    """The archive members to read, or spans where nothing has a CRC."""
    pieces: tuple[ValuePiece, ...]
    """The parts of tensors that they hold."""
    masters: frozenset[str]
    """Names of the trained tensors."""

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)

    def run(self, advance: Progress) -> list[ValueFact]:
        """Return the records with another CRC32, the tensors that are not finite, and whether all is zero."""
        values = _Values(sorted(self.pieces), self.masters)
        return [*_damaged(self.path, self.records, values, advance), *values.facts(self.path)]


def _damaged(path: Path, records: Iterable[Record | Span], values: _Values, advance: Progress) -> Iterator[Damaged]:
    """Yield the damaged records of a file; every block goes through `values`, too."""
    with open_regular(path) as fd:
        for record in sorted(records, key=attrgetter("offset")):
            crc = 0
            for begin, block, nbytes in _blocks(path, fd, record.offset, record.nbytes):
                crc = crc32(memoryview(block)[:nbytes], crc)
                values.look_at(begin, block, nbytes)
                advance(nbytes)
            if isinstance(record, Record) and crc != record.crc:
                yield Damaged(path=path, record=record.name, crc=crc, saved_crc=record.crc)


def _blocks(path: Path, fd: int, start: int, nbytes: int) -> Iterator[tuple[int, bytearray, int]]:
    """Yield each block's offset, this thread's buffer and how much of it is filled; a file that has become shorter ends
    early.
    """
    buffer = _ROOM.buffer
    for done in range(0, nbytes, BLOCK_BYTES):
        count = min(BLOCK_BYTES, nbytes - done)
        if read_into(path, fd, start + done, memoryview(buffer)[:count]) != count:
            return
        yield start + done, buffer, count


class _Values:
    """Checks the values of one file, block by block in the order of the file."""

    def __init__(self, pieces: list[ValuePiece], masters: frozenset[str]) -> None:
        self._pieces, self._masters = pieces, masters
        self._at = 0
        self._not_finite: dict[str, None] = {}
        self._trained = self._nonzero = False
        floats = {piece.name for piece in pieces if piece.dtype.is_float}
        matrices = {name for name in floats if not (_NO_MATRIX.search(name) or _STARTS_AT_ZERO.search(name))}
        self._matrices = matrices if len(matrices) > 1 else set()  # one may well be zero
        self._seen = self._written = False

    def look_at(self, begin: int, block: bytearray, nbytes: int) -> None:
        """Judge the pieces of tensors in the `nbytes` of the block, from the file's byte `begin`; padding is in none."""
        pieces, end = self._pieces, begin + nbytes
        while self._at < len(pieces) and pieces[self._at].end <= begin:
            self._at += 1
        for piece in _overlapping(pieces, self._at, end):
            first, last = max(piece.begin - begin, 0), min(piece.end, end) - begin
            if not _is_finite(block, first, last, piece.dtype):
                self._not_finite[piece.name] = None
            if piece.name in self._masters and not _STARTS_AT_ZERO.search(piece.name):
                self._trained = True
                self._nonzero = self._nonzero or _has_values(block, first, last)
            if not self._written and piece.name in self._matrices:
                self._seen, self._written = True, _has_values(block, first, last)

    def facts(self, path: Path) -> Iterator[ValueFact]:
        """Yield the tensors that are not finite, and whether everything was zero."""
        for name in self._not_finite:
            yield NotFinite(path=path, name=name)
        trained = self._trained and not self._nonzero
        if trained or (self._seen and not self._written):
            yield AllZero(path=path, trained=trained)


def _overlapping(pieces: list[ValuePiece], at: int, end: int) -> Iterator[ValuePiece]:
    while at < len(pieces) and pieces[at].begin < end:
        if pieces[at].end > pieces[at].begin:
            yield pieces[at]
        at += 1


def _has_values(block: bytearray, first: int, last: int) -> bool:
    """Return whether one of the bytes `first` to `last` is not zero, as nearly always one of the first few is not."""
    begun = min(last, first + _FEW_BYTES)
    return bool(block[first:begun].strip(b"\0")) or bool(block[begun:last].strip(b"\0"))


class _Exponent(NamedTuple):
    """Where the exponent of a float type is, little-endian: all ones means NaN or infinity."""

    size: int
    """Bytes of an element."""
    high: bytes
    """The values of an element's last byte with ones in all its exponent bits, for either sign."""
    below: int
    """The bits of the exponent that are in the byte before."""


_EXPONENTS: Mapping[DType, _Exponent] = {
    DType.BF16: _Exponent(2, b"\x7f\xff", 0x80),
    DType.F16: _Exponent(2, b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff", 0),
    DType.F32: _Exponent(4, b"\x7f\xff", 0x80),
    DType.F64: _Exponent(8, b"\x7f\xff", 0xF0),
}


def _is_finite(block: bytearray, first: int, last: int, dtype: DType) -> bool:
    """Return whether all elements in bytes `first` to `last` are finite.

    Without numpy, which takes longer to import than an adapter to check; a slice with a step is a copy at the speed of
    C.
    """
    if dtype not in _EXPONENTS:
        return True
    size, ones, below = _EXPONENTS[dtype]
    high = block[first + size - 1 : last : size]
    large = [byte for byte in ones if byte in high]
    if not large:
        return True
    bits = block[first + size - 2 : last : size]
    return not any(
        bits[found.start()] & below == below for byte in large for found in re.finditer(re.escape(bytes([byte])), high)
    )


def run_parts(parts: Sequence[Callable[[Progress], Sequence[T]]], advance: Progress) -> list[T]:
    """Run all parts, some at the same time, and return their results in the order of the parts. Raises what they raise.

    Each gets a function to call with the bytes that it reads, which raises to stop it once another part has failed.
    """
    from concurrent.futures import CancelledError, ThreadPoolExecutor  # slow, and plans do not run

    stop = threading.Event()

    def go_on(nbytes: int) -> None:
        if stop.is_set():
            raise CancelledError
        advance(nbytes)

    with ThreadPoolExecutor(min(4, available_cores())) as workers:
        try:
            found = [*workers.map(lambda part: part(go_on), parts)]
        except BaseException:
            stop.set()
            raise
    return [result for part in found for result in part]
