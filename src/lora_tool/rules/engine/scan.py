"""The scan of every value of a tensor: NaN and infinities, all zero, all equal, the largest magnitude.

The compiled kernel scans large tensors, or numpy without it. numpy costs 100 ms to import, more than the scan
of a usual adapter takes, so small tensors are scanned without either: the bytes of a little-endian float that hold its
sign and the top of its exponent are one slice (``data[3::4]`` for F32), and a value can only be NaN, infinite or absurd
where such a byte is that of a large number. Where there is one, `scan_numpy` counts.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from msgspec import Struct, field

from lora_tool.checkpoints import AdapterDir
from lora_tool.core.errors import LoraToolError
from lora_tool.core.records import kept
from lora_tool.core.tensors import Span, StoredTensor, TensorTable
from lora_tool.formats.files import open_regular, opened_regular, read_at
from lora_tool.formats.open_files import OpenFiles
from lora_tool.rules.engine.scan_model import LAYOUTS, NOT_FINITE, Layout, Opener, WeightScan, has_sign, shorter

if TYPE_CHECKING:
    from lora_tool.native.library import Kernel

CHUNK_BYTES = 1 << 20
"""Read at once: large enough for the disk, small enough for the cache. A multiple of every element's size."""

NUMPY_BYTES = 128 << 20
"""From this size on, numpy's import is soon won back."""
_LITTLE = 4 << 20
"""Below this size, neither the kernel nor numpy is worth loading and its threads."""

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
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes >= _LITTLE and (kernel := _kernel()) is not None:
            return _scan_all_compiled(kernel, tensors, opened, self.progress)
        least = min(_LITTLE, NUMPY_BYTES) if "numpy" in sys.modules else NUMPY_BYTES
        if nbytes < least:
            return {name: scan(tensor, opened) for name, tensor in tensors.items()}
        from lora_tool.rules.engine.scan_numpy import scan_all  # slow to import

        return scan_all(tensors, opened, progress=self.progress)


@kept
def scans_of(_: AdapterDir) -> Scans:
    """Return the adapter's scans, which it keeps: the rules read each adapter only once."""
    return Scans()


def _kernel() -> Kernel | None:
    """Return the compiled kernel, None without one: values are also judged where a merge would refuse its setting."""
    from lora_tool.native.library import kernel  # imports ctypes, which only large tensors need

    with contextlib.suppress(LoraToolError):
        return kernel()
    return None


def _scan_all_compiled(
    kernel: Kernel, tensors: TensorTable, opened: Opener, progress: Callable[[int], None] | None
) -> dict[str, WeightScan]:
    """Return the scan of each tensor by name; `scan` does those that the kernel leaves."""
    from lora_tool.rules.engine.scan_compiled import scan_compiled
    from lora_tool.rules.engine.scan_pool import scan_in_threads

    def scan_some(some: Sequence[StoredTensor], stopped: threading.Event) -> list[WeightScan]:
        return [scan_compiled(kernel, each, opened, stopped) or scan(each, opened) for each in some]

    return scan_in_threads(tensors, scan_some, progress=progress)


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
            from lora_tool.rules.engine.scan_numpy import scan_exactly  # slow to import

            return scan_exactly(tensor, opened)
    return WeightScan(all_zero=zero, constant=constant and not zero)


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
                yield from _span_chunks(fd, span)


def _span_chunks(fd: int, span: Span) -> Iterator[bytes]:
    at = 0
    while at < span.nbytes:
        wanted = min(CHUNK_BYTES, span.nbytes - at)
        data = read_at(span.path, fd, span.offset + at, wanted)
        if len(data) != wanted:
            raise shorter(span)
        yield data
        at += wanted
