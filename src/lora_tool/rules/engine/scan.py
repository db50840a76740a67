"""The scan of every value of a tensor: NaN and infinities, all zero, all equal, the largest magnitude.

The compiled kernel scans large tensors; it needs no numpy and gives the interpreter's lock away. numpy costs 100 ms to
import, more than the scan of a usual adapter takes, so other tensors are scanned without either: the bytes of a
little-endian float that hold its sign and the top of its exponent are one slice (``data[3::4]`` for F32), and a value
can only be NaN, infinite or absurd where such a byte is that of a large number. Where there is one, numpy counts.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from lora_tool.checkpoints import AdapterDir
from lora_tool.core.errors import SourceChanged
from lora_tool.core.machine import available_cores, batches_of_bytes
from lora_tool.core.records import kept
from lora_tool.core.tensors import DType, StoredTensor, TensorTable
from lora_tool.formats.files import open_regular, opened_regular, read_at
from lora_tool.formats.open_files import OpenFiles

if TYPE_CHECKING:
    from lora_tool.native.library import Kernel, Seen


Opener = Callable[[Path], AbstractContextManager[int]]
"""Gives a descriptor of a file for as long as it is read."""

LARGE = 512.0
"""Trained factors stay below about 1. Magnitudes from this on are told; it is a power of two that all types have."""


class WeightScan(Struct, frozen=True, kw_only=True):
    """The statistics of a tensor's values."""

    nonfinite: int = 0
    first: int | None = None
    """The index of the first value that is NaN or infinite."""
    all_zero: bool = False
    constant: bool = False
    """Whether all values, at least two, have the same bits, and are neither zero nor NaN nor infinite."""
    largest: float = 0.0
    """The largest finite magnitude where it is `LARGE` or more, else 0."""


class Layout(Struct, frozen=True):
    """How a float type lies in its bytes: exponent and fraction bits; a sign is before them."""

    nbytes: int
    exponent: int
    fraction: int

    @property
    def infinity(self) -> int:
        """The bits of +infinity; those of a magnitude are larger exactly where it is NaN."""
        return ((1 << self.exponent) - 1) << self.fraction

    @property
    def large(self) -> int:
        """The bits of `LARGE`; those of every larger magnitude are larger."""
        return (int(math.log2(LARGE)) + (1 << (self.exponent - 1)) - 1) << self.fraction

    def number(self, bits: int) -> float:
        """Return the value of the bits of a normal magnitude."""
        exponent, fraction = bits >> self.fraction, bits & ((1 << self.fraction) - 1)
        bias = (1 << (self.exponent - 1)) - 1
        return math.ldexp((1 << self.fraction) + fraction, exponent - bias - self.fraction)


LAYOUTS = {
    DType.F64: Layout(8, 11, 52),
    DType.F32: Layout(4, 8, 23),
    DType.BF16: Layout(2, 8, 7),
    DType.F16: Layout(2, 5, 10),
}


NOT_FINITE = {
    DType.F8_E4M3: b"\x7f\xff",
    DType.F8_E5M2: b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff",
    DType.F8_E8M0: b"\xff",
    DType.F8_E4M3FNUZ: b"\x80",
    DType.F8_E5M2FNUZ: b"\x80",
}
"""The codes of one byte that are NaN or infinite (OCP 8-bit Floating Point 1.0 and Microscaling 1.0, ONNX's float8)."""


def has_sign(dtype: DType) -> bool:
    """Return whether the first bit of an element is its sign, and zero may have one."""
    return dtype in LAYOUTS or len(NOT_FINITE.get(dtype, b"")) > 1


def magnitude(dtype: DType) -> int:
    """Return the bits of an element, or of its bytes if it has no float type, that are not the sign."""
    layout = LAYOUTS.get(dtype)
    return (1 << 8 * (layout.nbytes if layout else 1) - has_sign(dtype)) - 1


CHUNK_BYTES = 1 << 20
"""Read at once: large enough for the disk, small enough for the cache. A multiple of every element's size."""

_LITTLE = 4 << 20
"""Below this size, neither the kernel nor threads are worth loading."""
_MUCH = 64 << 20
"""From here on several cores scan."""
_TASK_BYTES = 8 << 20
"""Given to a thread at once."""
_CALL_BYTES = 8 << 20
"""Scanned in one call of the kernel: a run that fails waits for it."""
_MOST_WORKERS = 4
"""Reading from the disk and looking overlap; the cores of a small machine are enough to keep up with its disk."""

_ZEROS = bytes(CHUNK_BYTES)
_SIGN_ONLY = b"\x00\x80"


class Scans(Struct):
    """The scans of one folder's tensors, each made once. `progress` is called with the bytes that were read."""

    progress: Callable[[int], None] | None = None
    found: dict[str, WeightScan] = field(default_factory=dict)

    def of(self, tensor: StoredTensor, among: TensorTable) -> WeightScan:
        """Return the scan of one of the tensors `among`, which are all scanned at the first call.

        Raises `CorruptFile` or `SourceChanged` if a file went away.
        """
        if not self.found:
            with contextlib.closing(OpenFiles(opened_regular)) as files:
                self.found.update(self._all(among, files.descriptor))
        return self.found[tensor.name]

    def _all(self, tensors: TensorTable, opened: Opener) -> dict[str, WeightScan]:
        total = sum(tensor.nbytes for tensor in tensors.values())
        if total < _LITTLE:
            return {name: scan(tensor, opened) for name, tensor in tensors.items()}
        kernel, stopped = _kernel(), threading.Event()

        def scan_some(some: Sequence[StoredTensor]) -> list[WeightScan]:
            if kernel is None:
                return [scan(each, opened) for each in some]
            return [scan_compiled(kernel, each, opened, stopped) or scan(each, opened) for each in some]

        together = tuple(batches_of_bytes(tensors.values(), _TASK_BYTES))
        if kernel is not None and total < _MUCH:
            return self._counted(together, map(scan_some, together))
        from concurrent.futures import ThreadPoolExecutor  # takes as long to import as 50 MB to scan

        with ThreadPoolExecutor(min(_MOST_WORKERS, available_cores())) as pool:
            try:
                return self._counted(together, pool.map(scan_some, together))
            except BaseException:
                stopped.set()  # a tensor may take hours, and leaving the pool waits for it
                pool.shutdown(cancel_futures=True)
                raise

    def _counted(
        self, together: Iterable[Sequence[StoredTensor]], scans: Iterable[list[WeightScan]]
    ) -> dict[str, WeightScan]:
        found = {}
        for some, ones in zip(together, scans, strict=True):
            for tensor, one in zip(some, ones, strict=True):
                found[tensor.name] = one
                if self.progress is not None:
                    self.progress(tensor.nbytes)
        return found


@kept
def scans_of(_: AdapterDir) -> Scans:
    """Return the adapter's scans, which it keeps: the rules read each adapter only once."""
    return Scans()


def _kernel() -> Kernel | None:
    """Return the compiled kernel, None without one: values are also judged where a merge would refuse its setting."""
    from lora_tool.native.library import any_kernel  # imports ctypes, which only large tensors need

    return any_kernel()


def scan_compiled(kernel: Kernel, tensor: StoredTensor, opened: Opener, stopped: threading.Event) -> WeightScan | None:
    """Return the scan of the tensor's values; None where one may be NaN or infinite, or not all could be read."""
    layout, mask = LAYOUTS.get(tensor.dtype), magnitude(tensor.dtype)
    width = layout.nbytes if layout else 1
    seen: list[Seen] = []
    for span in tensor.spans:
        with opened(span.path) as file:
            for at in range(0, span.nbytes, _CALL_BYTES):
                nbytes = min(_CALL_BYTES, span.nbytes - at)
                found = None if stopped.is_set() else kernel.scan(file, span.offset + at, nbytes, width, mask)
                if found is None:
                    return None
                seen.append(found)
    largest = max((each.largest for each in seen), default=0)
    if layout is None:
        code = min(NOT_FINITE.get(tensor.dtype, b""), default=None)
        return WeightScan(all_zero=bool(seen) and largest == 0) if code is None or largest < code else None
    if largest >= layout.infinity:
        return None
    zero = tensor.spec.numel > 0 and largest == 0
    same = tensor.spec.numel > 1 and all(not each.differing and each.first == seen[0].first for each in seen)
    return WeightScan(
        all_zero=zero, constant=same and not zero, largest=layout.number(largest) if largest >= layout.large else 0.0
    )


def scan(tensor: StoredTensor, opened: Opener = open_regular) -> WeightScan:
    """Return the scan of the tensor's values; other types than floats only for zeros, those of 8 bits for NaN, too.

    `opened` gives its files, which stay open where many tensors of one are scanned. A tensor without elements is not
    all zero. Raises `CorruptFile` or `SourceChanged` if its file went away.
    """
    layout = LAYOUTS.get(tensor.dtype)
    if layout is None:
        return _scan_bytes(tensor, opened)
    width = layout.nbytes
    zero, constant, element = tensor.nbytes > 0, tensor.nbytes > width, b""
    for data in _chunks(tensor, opened):
        element = element or data[:width]
        zero = zero and _is_zero(data, width)
        constant = constant and _repeats(data, element)
        if not zero and data[width - 1 :: width].translate(None, _ordinary(layout)):
            return scan_exactly(tensor, layout, opened)
    return WeightScan(all_zero=zero, constant=constant and not zero)


def scan_exactly(tensor: StoredTensor, layout: Layout, opened: Opener) -> WeightScan:
    """Return the scan of a float tensor's values, with the bad ones counted. Raises as `scan`."""
    import numpy as np  # slow to import, and for few tensors

    mask = magnitude(tensor.dtype)
    nonfinite, first, largest, done = 0, None, 0, 0
    constant, element = tensor.spec.numel > 1, b""
    for data in _chunks(tensor, opened):
        element = element or data[: layout.nbytes]
        constant = constant and _repeats(data, element)
        # without its sign, the bits of a float are an integer that grows with its magnitude
        bits = np.frombuffer(data, f"<u{layout.nbytes}") & np.array(mask, f"<u{layout.nbytes}")
        bad = bits >= layout.infinity
        if bad.any():
            nonfinite += int(np.count_nonzero(bad))
            first = done + int(bad.argmax()) if first is None else first
        largest = max(largest, int(bits[~bad].max(initial=0)))
        done += bits.size
    zero = tensor.spec.numel > 0 and largest == 0 and not nonfinite
    return WeightScan(
        nonfinite=nonfinite,
        first=first,
        all_zero=zero,
        constant=constant and not zero and not nonfinite,
        largest=layout.number(largest) if largest >= layout.large else 0.0,
    )


def _scan_bytes(tensor: StoredTensor, opened: Opener) -> WeightScan:
    codes, zeros = NOT_FINITE.get(tensor.dtype, b""), b"\x00\x80" if has_sign(tensor.dtype) else b"\x00"
    nonfinite, first, zero, done = 0, None, tensor.nbytes > 0, 0
    for data in _chunks(tensor, opened):
        zero = zero and not data.strip(zeros)
        if found := [data.index(code) for code in codes if code in data]:
            nonfinite += len(data) - len(data.translate(None, codes))
            first = done + min(found) if first is None else first
        done += len(data)
    return WeightScan(nonfinite=nonfinite, first=first, all_zero=zero)


@cache
def _ordinary(layout: Layout) -> bytes:
    """Return the last bytes of elements whose magnitude is below `LARGE`, whatever the other bytes are."""
    last = layout.large >> 8 * (layout.nbytes - 1)
    return bytes(byte for byte in range(256) if byte & 0x7F < last)


def _repeats(data: bytes, element: bytes) -> bool:
    """Whether every element is `element`."""
    if not data.startswith(element) or not data.endswith(element):
        return False
    return data == element * (len(data) // len(element))


def _is_zero(data: bytes, nbytes: int) -> bool:
    """Whether every element is 0.0 or -0.0."""
    if data == _ZEROS[: len(data)]:
        return True
    if data.strip(_SIGN_ONLY):
        return False
    # only 00 and 80 bytes: zeros if every 80 is a sign, in the last byte of its element
    return data.count(0x80) == data[nbytes - 1 :: nbytes].count(0x80)


def _chunks(tensor: StoredTensor, opened: Opener) -> Iterator[bytes]:
    for span in tensor.spans:
        if span.nbytes:
            with opened(span.path) as fd:
                for at in range(0, span.nbytes, CHUNK_BYTES):
                    wanted = min(CHUNK_BYTES, span.nbytes - at)
                    data = read_at(span.path, fd, span.offset + at, wanted)
                    if len(data) != wanted:
                        raise SourceChanged(f"{span.path} was truncated while it was read")
                    yield data
