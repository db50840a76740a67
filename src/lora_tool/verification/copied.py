"""Whether copies are the bytes of their sources. numpy is imported only where they differ, or do not lie as they are meant."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lora_tool.core.tensors import Span, StoredTensor, TransposedSpan
from lora_tool.formats.open_files import OpenFiles, opened
from lora_tool.verification.pieces import Compared, Stretch, Tally

if TYPE_CHECKING:
    from lora_tool.verification.elements import Array, Files

_CHUNK_BYTES = 1 << 20
"""Bytes compared together: what is read stays in the cache."""


class Copies(OpenFiles):
    """Files that are open to compare copies with their sources. A context manager, safe for threads."""

    def __init__(self) -> None:
        super().__init__(opened)
        self._decoding: Files | None = None
        self._making = threading.Lock()
        self._local = threading.local()

    def look(self, part: Compared, stretches: Iterable[Stretch]) -> Tally:
        """Return the tally of the stretches, byte by byte. Raises `SourceChanged` where a file ends early, `OSError`."""
        tally, whole = Tally(), _transposed(part.op.source)
        matrix = None if whole is None else self._files().as_meant(whole)
        for start, nbytes in stretches:
            tally.compared += nbytes // _width(part.stored)
            places = _in_one_piece(part, start, nbytes)
            if places is None or not self._are_equal(*places):
                self._count(tally, part, (start, nbytes), matrix)
        return tally

    def _are_equal(self, copy: Span, source: Span) -> bool:
        """Return whether both files hold the same bytes there."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
        one, other = self._local.buffers
        for at in range(0, copy.nbytes, _CHUNK_BYTES):
            count = min(_CHUNK_BYTES, copy.nbytes - at)
            self.read_exactly(copy.path, copy.offset + at, memoryview(one)[:count])
            self.read_exactly(source.path, source.offset + at, memoryview(other)[:count])
            if not one.startswith(memoryview(other)[:count]):  # memcmp; `==` of memoryviews goes item by item
                return False
        return True

    def _count(self, tally: Tally, part: Compared, stretch: Stretch, matrix: Array | None) -> None:
        """Add the elements of a stretch that differ to the tally; `matrix` is the source where it lies transposed."""
        import numpy as np  # for few files

        start, nbytes = stretch
        stored, width = self._files().read(part.stored, start, nbytes), _width(part.stored)
        source = self._files().read(part.op.source, start, nbytes) if matrix is None else _part(matrix, start, nbytes)
        if np.array_equal(stored, source):
            return
        differing = np.unique(np.flatnonzero(stored != source) // width)
        tally.add(
            Tally(
                outside=len(differing),
                wrong=len(differing),
                first=part.begin + start // width + int(differing[0]),
                moved=True,
            )
        )

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


def _transposed(source: StoredTensor) -> TransposedSpan | None:
    """Return where a matrix lies transposed in one piece: it is read once, not for every stretch."""
    span = source.spans[0] if len(source.spans) == 1 else None
    return span if isinstance(span, TransposedSpan) and span.nbytes == span.stored_bytes else None


def _part(matrix: Array, start: int, nbytes: int) -> Array:
    """Return bytes of the matrix, row after row, from its byte `start`."""
    import numpy as np  # for few files

    row_bytes = matrix.shape[1] * matrix.itemsize
    first, last = start // row_bytes, -(-(start + nbytes) // row_bytes)
    rows = np.ascontiguousarray(matrix[first:last]).reshape(-1).view(np.uint8)
    return rows[start - first * row_bytes :][:nbytes]


def _in_one_piece(part: Compared, start: int, nbytes: int) -> tuple[Span, Span] | None:
    """Return where a stretch and its source lie; None where either is not plain bytes in one piece of a file."""
    stored, source = tuple(part.stored.part(start, nbytes)), tuple(part.op.source.part(start, nbytes))
    if len(stored) != 1 or len(source) != 1 or type(stored[0]) is not Span or type(source[0]) is not Span:
        return None
    return stored[0], source[0]


def _width(tensor: StoredTensor) -> int:
    """Return the bytes of an element, of those that are smaller one."""
    return max(1, tensor.dtype.bits // 8)
