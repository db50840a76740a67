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
    constant: bool = False
    """Whether every element has the same bytes."""
    huge: int = 0
    """How many values of the first megabyte are finite and of 32768 or more (131072 in F64)."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a float type keeps its exponent: masks for the last byte of an element, and for the one before it."""

    nbytes: int
    last: int
    before: int
    suspects: tuple[int, ...]
    """The values of the last byte that have its part of the exponent full."""
    huge: bytes
    """For each value of the last byte, 1 where the exponent is that of 2¹⁵ or more."""

    def count_huge(self, data: bytes) -> int:
        """Return how many elements of `data` are 2¹⁵ or more (2¹⁷ in F64), NaN and infinities among them."""
        return data[self.nbytes - 1 :: self.nbytes].translate(self.huge).count(1)

    def full_exponents(self, data: bytes) -> tuple[int, int | None]:
        """Return how many elements of `data` have every exponent bit set, and the index of the first."""
        last = data[self.nbytes - 1 :: self.nbytes]
        # a few searches at memchr's speed are far quicker than one pass of `translate`
        if not any(byte in last for byte in self.suspects):
            return 0, None
        marks = int.from_bytes(last.translate(_marks(self.last)), "little")
        if self.before:
            before = data[self.nbytes - 2 :: self.nbytes]
            marks &= int.from_bytes(before.translate(_marks(self.before)), "little")
        count = marks.bit_count()
        return count, ((marks & -marks).bit_length() - 1) // 8 if count else None


def _marks(mask: int) -> bytes:
    return bytes(int(byte & mask == mask) for byte in range(256))


def _layout(nbytes: int, *, last: int, before: int, huge: int) -> _Layout:
    suspects = tuple(byte for byte in range(256) if byte & last == last)
    marks = bytes(int(byte & 0x7F >= huge) for byte in range(256))
    return _Layout(nbytes=nbytes, last=last, before=before, suspects=suspects, huge=marks)


_LAYOUTS = {
    DType.F64: _layout(8, last=0x7F, before=0xF0, huge=0x41),
    DType.F32: _layout(4, last=0x7F, before=0x80, huge=0x47),
    DType.BF16: _layout(2, last=0x7F, before=0x80, huge=0x47),
    DType.F16: _layout(2, last=0x7C, before=0, huge=0x78),
}


def scan(tensor: StoredTensor) -> WeightScan:
    """Return what the tensor's values are like; types other than F16, BF16, F32 and F64 have only zeros looked for.

    A tensor without elements is not all zero. Raises `CorruptFile` or `SourceChanged` if its file went away.
    """
    layout = _LAYOUTS.get(tensor.dtype)
    nonfinite, first, zero, done = 0, None, tensor.nbytes > 0, 0
    constant, element, huge = tensor.nbytes > 0, b"", 0
    for data in _chunks(tensor):
        zero = zero and _is_zero(data, tensor.dtype.bits // 8 if layout else 1, signed=layout is not None)
        if layout is not None:
            element = element or data[: layout.nbytes]
            constant = constant and _repeats(data, element)
            huge = huge if done or zero else layout.count_huge(data)
        if layout is not None and not zero:
            count, at = layout.full_exponents(data)
            if at is not None and first is None:
                first = done + at
            nonfinite += count
            done += len(data) // layout.nbytes
        elif layout is not None:
            done += len(data) // layout.nbytes
    return WeightScan(
        nonfinite=nonfinite,
        first=first,
        all_zero=zero,
        constant=constant and layout is not None,
        huge=0 if nonfinite else huge,
    )


def _repeats(data: bytes, element: bytes) -> bool:
    """Whether `data` is one element over and over; a glance at its beginning nearly always tells."""
    few = len(element) * 16
    return data[:few] == element * (len(data[:few]) // len(element)) and data == element * (len(data) // len(element))


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
