"""The scan of weights with numpy, for large tensors and for those whose bad values must be counted.

Without its sign, the bits of a float are an integer that grows with its magnitude: the largest one of a block shows
whether the block is all zero, or holds an absurd, infinite or NaN value. Blocks are small enough to stay in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.files import open_regular, read_into
from lora_tool.rules.engine.scan_model import LAYOUTS, NOT_FINITE, Layout, Opener, WeightScan, magnitude, shorter
from lora_tool.rules.engine.scan_pool import scan_in_threads

_BLOCK_BYTES = 1 << 19

Bits = NDArray[Any]


def scan_all(
    tensors: TensorTable, opened: Opener = open_regular, *, progress: Callable[[int], None] | None = None
) -> dict[str, WeightScan]:
    """Return the scan of each tensor by name; `opened` is called by several threads. Raises as `scan_exactly`, for the first that fails."""

    def scan_some(some: Sequence[StoredTensor], stopped: threading.Event) -> list[WeightScan]:
        buffer = np.empty(_BLOCK_BYTES, np.uint8)
        return [scan_exactly(tensor, opened, stopped, buffer) for tensor in some]

    return scan_in_threads(tensors, scan_some, progress=progress)


def scan_exactly(
    tensor: StoredTensor,
    opened: Opener = open_regular,
    stopped: threading.Event | None = None,
    buffer: NDArray[np.uint8] | None = None,
) -> WeightScan:
    """Return the scan of the tensor's values; other types than floats only for zeros, those of 8 bits for NaN, too.

    Nothing more is read once `stopped` is set; blocks are read into the `buffer`, if there is one. Raises `CorruptFile`
    or `SourceChanged` if its file went away.
    """
    layout = LAYOUTS.get(tensor.dtype)
    buffer = np.empty(_BLOCK_BYTES, np.uint8) if buffer is None else buffer
    blocks = _blocks(tensor, np.dtype(f"<u{layout.nbytes}" if layout else np.uint8), opened, stopped, buffer)
    if layout is None:
        return _scan_bytes(tensor, blocks)
    return _scan_floats(tensor, layout, blocks)


def _scan_bytes(tensor: StoredTensor, blocks: Iterator[Bits]) -> WeightScan:
    codes, mask = np.frombuffer(NOT_FINITE.get(tensor.dtype, b""), np.uint8), magnitude(tensor.dtype)
    nonfinite, first, zero, done = 0, None, tensor.nbytes > 0, 0
    for block in blocks:
        zero = zero and not np.any(block & np.uint8(mask))
        bad = np.isin(block, codes) if codes.size else codes
        if bad.any():
            nonfinite += int(np.count_nonzero(bad))
            first = done + int(bad.argmax()) if first is None else first
        done += block.size
    return WeightScan(nonfinite=nonfinite, first=first, all_zero=zero)


def _scan_floats(tensor: StoredTensor, layout: Layout, blocks: Iterator[Bits]) -> WeightScan:
    sign = 1 << (8 * layout.nbytes - 1)
    nonfinite, first, largest, done = 0, None, 0, 0
    constant, element = tensor.spec.numel > 1, None
    for block in blocks:
        element = block[0].copy() if element is None else element
        constant = constant and bool(block[-1] == element) and bool((block == element).all())
        top = _top(block, sign)
        if top >= layout.infinity:
            bits = np.bitwise_and(block, block.dtype.type(sign - 1))
            bad = bits >= layout.infinity
            nonfinite += int(np.count_nonzero(bad))
            first = done + int(bad.argmax()) if first is None else first
            top = int(bits[~bad].max(initial=0))
        largest = max(largest, top)
        done += block.size
    zero = tensor.spec.numel > 0 and largest == 0 and not nonfinite
    return WeightScan(
        nonfinite=nonfinite,
        first=first,
        all_zero=zero,
        constant=constant and not zero and not nonfinite,
        largest=layout.number(largest) if largest >= layout.large else 0.0,
    )


def _top(block: Bits, sign: int) -> int:
    """Return the largest magnitude's bits: two maxima, of the positive and the negative values, and no copy."""
    positive = int(block.view(f"<i{block.itemsize}").max())
    either = int(block.max())
    return max(positive, either - sign if either >= sign else 0)


def _blocks(
    tensor: StoredTensor,
    kind: np.dtype[Any],
    opened: Opener,
    stopped: threading.Event | None,
    buffer: NDArray[np.uint8],
) -> Iterator[Bits]:
    """Yield the tensor's elements in blocks, all in the `buffer`."""
    for span in tensor.spans:
        if not span.nbytes:
            continue
        with opened(span.path) as fd:
            for at in range(0, span.nbytes, buffer.size):
                if stopped is not None and stopped.is_set():
                    return
                block = buffer[: min(buffer.size, span.nbytes - at)]
                if read_into(span.path, fd, span.offset + at, block.data) != block.nbytes:
                    raise shorter(span)
                yield block.view(kind)
