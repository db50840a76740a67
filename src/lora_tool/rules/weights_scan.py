"""Looking at every value of a tensor without numpy: how many are NaN or infinite, and whether all are zero.

numpy costs 150 ms to import, more than most scans take. The bytes of a little-endian float that hold its sign and the
top of its exponent are one slice (``data[3::4]`` for F32), and only where one of them has all the exponent bits set
can a value be NaN or infinite; in weights that is so rare that the exact test hardly ever runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from lora_tool.errors import SourceChanged
from lora_tool.formats.files import open_regular
from lora_tool.tensors import DType, Span, StoredTensor

CHUNK_BYTES = 1 << 20
"""Read at once: large enough for the disk, small enough for the cache. A multiple of every element's size."""

_ZEROS = bytes(CHUNK_BYTES)
_SIGN_ONLY = b"\x00\x80"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScan:
    """What the values of a tensor are like. `first` is the index of the first value that is NaN or infinite."""

    nonfinite: int
    first: int | None
    all_zero: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a float type keeps its exponent: masks for the last byte of an element, and for the one before it."""

    nbytes: int
    last: int
    before: int

    def full_exponents(self, data: bytes) -> tuple[int, int | None]:
        """Return how many elements of `data` have every exponent bit set, and the index of the first."""
        last = data[self.nbytes - 1 :: self.nbytes]
        if not self._suspicious(last):
            return 0, None
        marks = int.from_bytes(last.translate(_marks(self.last)), "little")
        if self.before:
            before = data[self.nbytes - 2 :: self.nbytes]
            marks &= int.from_bytes(before.translate(_marks(self.before)), "little")
        count = marks.bit_count()
        return count, ((marks & -marks).bit_length() - 1) // 8 if count else None

    def _suspicious(self, last: bytes) -> bool:
        # a few searches at memchr's speed are far quicker than one pass of `translate`
        return any(byte in last for byte in range(self.last, 256) if byte & self.last == self.last)


def _marks(mask: int) -> bytes:
    return bytes(int(byte & mask == mask) for byte in range(256))


_LAYOUTS = {
    DType.F64: _Layout(8, 0x7F, 0xF0),
    DType.F32: _Layout(4, 0x7F, 0x80),
    DType.BF16: _Layout(2, 0x7F, 0x80),
    DType.F16: _Layout(2, 0x7C, 0),
}


def scan(tensor: StoredTensor) -> WeightScan:
    """Return what the tensor's values are like; types other than F16, BF16, F32 and F64 have only zeros looked for.

    A tensor without elements is not all zero. Raises `CorruptFile` or `SourceChanged` if its file went away.
    """
    layout = _LAYOUTS.get(tensor.dtype)
    nonfinite, first, zero, done = 0, None, tensor.nbytes > 0, 0
    for data in _chunks(tensor):
        zero = zero and _is_zero(data, tensor.dtype.bits // 8 if layout else 1, signed=layout is not None)
        if layout is not None and not zero:
            count, at = layout.full_exponents(data)
            if at is not None and first is None:
                first = done + at
            nonfinite += count
            done += len(data) // layout.nbytes
        elif layout is not None:
            done += len(data) // layout.nbytes
    return WeightScan(nonfinite=nonfinite, first=first, all_zero=zero)


def _is_zero(data: bytes, nbytes: int, *, signed: bool) -> bool:
    """Whether every element is 0.0 or -0.0."""
    if data == _ZEROS[: len(data)]:
        return True
    if not signed or data.strip(_SIGN_ONLY):
        return False
    # only 00 and 80 bytes: zeros if every 80 is a sign, in the last byte of its element
    return data.count(0x80) == data[nbytes - 1 :: nbytes].count(0x80)


def _chunks(tensor: StoredTensor) -> Iterator[bytes]:
    for span in tensor.spans:
        if span.nbytes:
            with open_regular(span.path) as fd:
                yield from _span_chunks(fd, span)


def _span_chunks(fd: int, span: Span) -> Iterator[bytes]:
    at = 0
    while at < span.nbytes:
        wanted = min(CHUNK_BYTES, span.nbytes - at)
        data = os.pread(fd, wanted, span.offset + at)
        if len(data) != wanted:
            raise SourceChanged(f"{span.path} became shorter while it was read")
        yield data
        at += wanted
