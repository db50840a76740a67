"""Stored elements: read from files, as numbers, and how far apart neighbouring numbers of their type are."""

from __future__ import annotations

import threading
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.core.tensors import DType, Span, StoredTensor, TransposedSpan
from lora_tool.formats.open_files import OpenFiles, Room, opened
from lora_tool.formats.quantised.encodings import QuantisedSpan, Tiled
from lora_tool.formats.stored import fill
from lora_tool.verification.pieces import Rows, rows_and_columns

if TYPE_CHECKING:
    from lora_tool.formats.quantised.arrays import Strips
    from lora_tool.formats.quantised.encodings import Encoding
    from lora_tool.formats.stored import Decode
    from lora_tool.verification.dequantised import ReadBytes

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


class FloatType(Struct, frozen=True, kw_only=True):
    """How a float type is laid out: IEEE 754's binary16, 32, 64, and bfloat16, the upper half of a binary32."""

    bits: str
    """numpy's type of the stored bits."""
    digits: int
    """Significant binary digits, the hidden one counted."""
    smallest: int
    """Exponent of the smallest normal number: subnormals below it are as far apart as the numbers at it."""

    @property
    def roundoff(self) -> float:
        """The unit roundoff: rounding x once is off by this times |x| at most."""
        return float(2.0**-self.digits)


FLOATS: dict[DType, FloatType] = {
    DType.BF16: FloatType(bits="<u2", digits=8, smallest=-126),
    DType.F16: FloatType(bits="<u2", digits=11, smallest=-14),
    DType.F32: FloatType(bits="<u4", digits=24, smallest=-126),
    DType.F64: FloatType(bits="<u8", digits=53, smallest=-1022),
}


def decode(raw: Bytes, dtype: DType, wide: np.dtype[Any]) -> Array:
    """Return the elements stored in `raw` as a new flat array of `wide`, float32 or float64."""
    return _as_float(raw.view(FLOATS[dtype].bits), dtype, wide)


def half_ulps(values: Array, dtype: DType) -> Array:
    """Return half the distance of each decoded element to its neighbour away from zero: what rounding once may cost it."""
    bits, mask = ("<u4", 0x7F800000) if values.dtype == np.float32 else ("<u8", 0x7FF0000000000000)
    layout = FLOATS[dtype]
    powers: Array = np.bitwise_and(values.view(bits), np.array(mask, bits)).view(values.dtype)
    np.multiply(powers, layout.roundoff, out=powers)
    least = max(2.0 ** (layout.smallest - layout.digits), float(np.finfo(values.dtype).smallest_subnormal))
    if powers.min(initial=least) < least:  # seldom, and maximum takes longer than all before it
        np.maximum(powers, values.dtype.type(least), out=powers)
    return np.asarray(powers)


def _as_float(bits: Array, dtype: DType, wide: np.dtype[Any]) -> Array:
    if dtype is DType.BF16:
        shifted = bits.astype("<u4")
        np.left_shift(shifted, 16, out=shifted)
        return shifted.view("<f4").astype(wide, copy=False)
    same = {DType.F16: "<f2", DType.F32: "<f4", DType.F64: "<f8"}[dtype]
    return bits.view(same).astype(wide)


def some_rows(stored: Bytes, rows: slice, dtype: DType, width: int) -> Bytes:
    """Return the bytes of some of the rows that are stored one after the other, `width` elements each."""
    row_bytes = width * dtype.bits // 8
    return stored[rows.start * row_bytes : rows.stop * row_bytes]


def _tiles_of(span: Span | None, tensor: StoredTensor) -> tuple[Tiled, int] | None:
    """Return the tiles that a matrix is decoded of, and its first row there; None of other tensors."""
    if not isinstance(span, QuantisedSpan) or not isinstance(span.encoding, Tiled):
        return None
    spec = span.encoding.spec
    above, rest = divmod(span.start, spec.shape[-1] * spec.dtype.bits // 8)
    is_matrix = tensor.shape == (tensor.shape[0], spec.shape[-1])
    return (span.encoding, above) if is_matrix and not rest else None


_READ_BYTES = 1 << 19


class Files(OpenFiles):
    """Files open for reading: opened when they are read, a bounded number. A context manager, safe for threads."""

    def __init__(self) -> None:
        super().__init__(opened)
        self._strips: Strips | None = None
        self._local = threading.local()

    def read(self, tensor: StoredTensor, start: int, nbytes: int) -> Bytes:
        """Return `nbytes` bytes of the tensor from its byte `start`. Raises `SourceChanged` where the file ends early."""
        out = np.empty(nbytes, np.uint8)
        fill(out.data, tensor, start, self.read_exactly, self._decode)
        return out

    def as_meant(self, whole: TransposedSpan) -> Array:
        """Return a matrix that lies transposed in its file, [rows, columns], as a view of what is stored."""
        stored = np.empty(whole.stored_bytes, np.uint8)
        self.read_exactly(whole.path, whole.offset, stored.data)
        return stored.view(f"u{whole.itemsize}").reshape(whole.columns, whole.rows).T

    def rows(self, tensor: StoredTensor, rows: Rows, decode: Decode | None = None, place: str = "") -> Bytes:
        """Return the bytes of the ranges of rows, one after the other; `decode` makes numbers of quantised ones.

        With a `place` they are valid until this thread reads into it again.
        """
        return self.ranges(tensor, rows, rows_and_columns(tensor.shape)[1] * tensor.dtype.bits // 8, decode, place)

    def ranges(
        self, tensor: StoredTensor, rows: Rows, row_bytes: int, decode: Decode | None = None, place: str = ""
    ) -> Bytes:
        """Do what `rows` does where a row has so many bytes, whatever the tensor's shape."""
        nbytes = (sum(map(itemgetter(1), rows)) - sum(map(itemgetter(0), rows))) * row_bytes
        out = self._room.of(place, (nbytes,), np.dtype(np.uint8)) if place else np.empty(nbytes, np.uint8)
        whole = tensor.spans[0] if len(tensor.spans) == 1 else None
        begin = whole.offset if type(whole) is Span else 0
        target, done, pieces = out.data, 0, []
        for first, last in rows:
            end = done + (last - first) * row_bytes
            pieces.append((begin + first * row_bytes, target[done:end]))
            done = end
        if type(whole) is Span:  # nearly always, and a sample is thousands of single rows
            self.read_pieces(whole.path, pieces)
        elif type(whole) is TransposedSpan and whole.nbytes == whole.stored_bytes:  # read once, not for every row
            matrix = self.as_meant(whole)
            rows_of = out.view(f"u{whole.itemsize}").reshape(-1, whole.columns)
            np.concatenate([matrix[first:last] for first, last in rows], out=rows_of)
        elif decode is None and (tiles := _tiles_of(whole, tensor)) is not None:
            from lora_tool.verification.dequantised import tiled_again  # only for quantised weights

            encoding, above = tiles
            ranges = [(above + first, above + last) for first, last in rows]
            out[...] = tiled_again(encoding, ranges, self.ranges).reshape(-1).view(np.uint8)
        else:
            for start, piece in pieces:
                fill(piece, tensor, start, self.read_exactly, decode or self._decode)
        return out

    def columns(self, tensor: StoredTensor, columns: Array) -> Bytes:
        """Return the bytes of these columns of a matrix, one row of them after the other.

        All of it is read, some rows at a time: each column is somewhere in every row.
        """
        height, width = tensor.shape
        kind, span = np.dtype(FLOATS[tensor.dtype].bits), tensor.spans[0]
        if len(tensor.spans) > 1 or type(span) is not Span:
            whole = self.rows(tensor, [(0, height)]).view(kind).reshape(-1, width)
            return whole[:, columns].reshape(-1).view(np.uint8)
        made = np.empty((height, len(columns)), kind)
        step = max(1, _READ_BYTES // max(1, width * kind.itemsize))
        for first in range(0, height, step):
            some = self._room.of("columns", (min(step, height - first), width), kind)
            self.read_exactly(span.path, span.offset + first * some.strides[0], some.reshape(-1).view(np.uint8).data)
            made[first : first + len(some)] = some[:, columns]
        return made.reshape(-1).view(np.uint8)

    @property
    def _room(self) -> Room:
        """This thread's own."""
        if not hasattr(self._local, "room"):
            self._local.room = Room()
        room: Room = self._local.room
        return room

    def _decode(self, encoding: Encoding, first: int, last: int, read: ReadBytes) -> Array:
        """Return rows of what quantised weights stand for."""
        from lora_tool.formats.quantised.arrays import Strips  # only for quantised weights
        from lora_tool.verification.dequantised import dequantised_again

        self._strips = self._strips or Strips()
        return dequantised_again(encoding, first, last, read, self._strips)

    def matrix(
        self, tensor: StoredTensor, rows: Rows | None, wide: np.dtype[Any], dequantise: Decode | None = None
    ) -> Array:
        """Return ranges of rows (all without `rows`) as numbers, [rows, columns]."""
        height, width = rows_and_columns(tensor.shape)
        return decode(self.rows(tensor, rows or [(0, height)], dequantise), tensor.dtype, wide).reshape(-1, width)
