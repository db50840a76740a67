"""Whether copies are the bytes of their sources: compared by compiled code, by numpy where that is not to be had."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.formats.open_files import OpenFiles, opened
from lora_tool.tensors import Span, StoredTensor, TransposedSpan
from lora_tool.verification.native.copies import Copy, copy_comparison
from lora_tool.verification.pieces import Compared, Stretch
from lora_tool.verification.tally import Tally

if TYPE_CHECKING:
    from lora_tool.verification.elements import Files

_Piece = tuple[Compared, Stretch]
_Paths = tuple[Path, Path]


class Copies(OpenFiles):
    """Files that are open to compare copies with their sources. A context manager, safe for threads."""

    def __init__(self) -> None:
        super().__init__(opened)
        self._decoding: Files | None = None
        self._making = threading.Lock()

    def look(self, part: Compared, stretches: Iterable[Stretch]) -> Tally:
        """Return what `look_at_each` does of one part."""
        return self.look_at_each([(part, stretches)])[0]

    def look_at_each(self, parts: Sequence[tuple[Compared, Iterable[Stretch]]]) -> list[Tally]:
        """Return the tally of each part's stretches, byte by byte. Raises `SourceChanged` where a file ends early, `OSError`."""
        tallies = [Tally() for _ in parts]
        pieces = [(at, (part, stretch)) for at, (part, stretches) in enumerate(parts) for stretch in stretches]
        if (compiled := copy_comparison()) is not None:
            placed = [(at, piece, _in_files(*piece)) for at, piece in pieces]
            pieces = [(at, piece) for at, piece, place in placed if place is None]
            here = [(at, piece, *place) for at, piece, place in placed if place is not None]
            for (path, source), some in groupby(here, key=itemgetter(2)):
                asked = list(some)
                with self.descriptor(path) as file, self.descriptor(source) as other:
                    seen = compiled.look(file, other, [copy for *_, copy in asked])
                for (at, piece, *_), copy in zip(asked, seen, strict=False):
                    tallies[at].add(_tally(piece, copy.first, copy.differing))
                pieces += [(at, piece) for at, piece, *_ in asked[len(seen) :]]  # what ends early is named there
        for at, piece in pieces:
            tallies[at].add(self._compared(piece))
        return tallies

    def _compared(self, piece: _Piece) -> Tally:
        """Compare a stretch that does not lie in one piece of a file, or that no compiled code compares."""
        import numpy as np  # for what few files need

        part, stretch = piece
        stored, source = (self._files().read(tensor, *stretch) for tensor in (part.stored, part.op.source))
        if np.array_equal(stored, source):
            return _tally(piece, 0, 0)
        off = np.unique(np.flatnonzero(stored != source) // _width(part.stored))
        return _tally(piece, int(off[0]) * _width(part.stored), len(off))

    def _files(self) -> Files:
        """Return what reads tensors of any kind."""
        with self._making:
            if self._decoding is None:
                from lora_tool.verification.elements import Files

                self._decoding = Files()
            return self._decoding

    def close(self) -> None:
        """Close all of them."""
        if self._decoding is not None:
            self._decoding.close()
        super().close()


def _in_files(part: Compared, stretch: Stretch) -> tuple[_Paths, Copy] | None:
    """Return the two files that a stretch and its source lie in, and where; None where either is not in one piece."""
    stored, source = tuple(part.stored.part(*stretch)), tuple(part.op.source.part(*stretch))
    if len(stored) != 1 or len(source) != 1 or type(stored[0]) is not Span:
        return None
    place, width = source[0], _width(part.stored)
    copy = Copy(at=stored[0].offset, nbytes=stretch[1], source=place.offset, width=width)
    if type(place) is TransposedSpan and place.itemsize == width:
        copy.start, copy.rows, copy.columns = place.start, place.rows, place.columns
    elif type(place) is not Span:
        return None
    return (stored[0].path, place.path), copy


def _tally(piece: _Piece, first: int, differing: int) -> Tally:
    """Return the tally of a stretch in which so many elements differ, the first of them at byte `first`."""
    part, (start, nbytes) = piece
    width = _width(part.stored)
    tally = Tally(compared=nbytes // width)
    if differing:
        tally.outside = tally.wrong = differing
        tally.first = part.begin + (start + first) // width
        tally.moved = True
    return tally


def _width(tensor: StoredTensor) -> int:
    """Return the bytes of an element, of those that are smaller one."""
    return max(1, tensor.dtype.bits // 8)
