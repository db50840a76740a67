"""The scan of weights by the compiled loop, in threads of its own: it can go on while Python imports what plans with them.

What the loop finds infinite or NaN, or cannot read, is looked at again in Python, which counts and names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lora_tool.batches import batches_of_bytes
from lora_tool.errors import LoraToolError
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.rules.engine.native.library import CompiledScan, Piece
from lora_tool.rules.engine.scan_model import LAYOUTS, NOT_FINITE, WeightScan, magnitude
from lora_tool.tensors import StoredTensor, TensorTable

_BLOCK_BYTES = 256 << 10
"""In the cache of a core."""
_CALL_BYTES = 32 << 20
"""Of a call: a few milliseconds from memory, and not long from a slow disk, where Ctrl-C waits for it."""
_POLL_SECONDS = 0.05


class CompiledScanning:
    """Tensors that are being scanned by `threads` in the background and, once it asks, by whoever wants the result."""

    def __init__(self, compiled: CompiledScan, tensors: TensorTable, *, threads: int) -> None:
        self._compiled = compiled
        self._left = deque(batches_of_bytes(tensors.values(), _CALL_BYTES))
        self._found: dict[str, WeightScan | None] = {}
        self._read: deque[int] = deque()  # bytes that nobody has been told of
        # as daemons: whoever gives up waits for none of them
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def results(self, progress: Callable[[int], None] | None = None) -> dict[str, WeightScan | None]:
        """Return the scan of each tensor by name, None for those that are left to Python; `progress` is called here, with
        the bytes that were read.
        """

        def tell() -> None:
            while progress is not None and self._read:
                progress(self._read.popleft())

        self._work(after_each=tell)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                tell()
        tell()
        return self._found

    def _work(self, after_each: Callable[[], None] = lambda: None) -> None:
        block = ctypes.create_string_buffer(_BLOCK_BYTES)
        with contextlib.closing(OpenFiles(opened_regular)) as files:
            while True:
                try:
                    some = self._left.popleft()
                except IndexError:
                    return
                self._found.update(self._scanned(some, files, block))
                self._read.append(sum(tensor.nbytes for tensor in some))
                after_each()

    def _scanned(
        self, tensors: Sequence[StoredTensor], files: OpenFiles, block: ctypes.Array[ctypes.c_char]
    ) -> Iterator[tuple[str, WeightScan | None]]:
        """Yield the scan of each tensor, None where pieces of it could not be read, or hold NaN or infinity."""
        seen: dict[str, list[Piece]] = {tensor.name: [] for tensor in tensors}
        for path, pieces in itertools.groupby(_pieces(tensors), key=lambda piece: piece.path):
            with contextlib.suppress(LoraToolError, OSError), files.descriptor(path) as descriptor:
                for call in batches_of_bytes(pieces, _CALL_BYTES):
                    looked = self._compiled.look(descriptor, [each.piece for each in call], block)
                    for each, piece in zip(call, looked, strict=False):
                        seen[each.name].append(piece)
        for tensor in tensors:
            yield tensor.name, _scan_of(tensor, seen[tensor.name])


class _Named(NamedTuple):
    """A piece of a tensor in a file."""

    name: str
    path: Path
    piece: Piece

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes


def _pieces(tensors: Sequence[StoredTensor]) -> Iterator[_Named]:
    for tensor in tensors:
        layout, mask = LAYOUTS.get(tensor.dtype), magnitude(tensor.dtype)
        for span in tensor.spans:
            for at in range(0, span.nbytes, _CALL_BYTES):
                nbytes = min(_CALL_BYTES, span.nbytes - at)
                width = layout.nbytes if layout else 1
                piece = Piece(offset=span.offset + at, nbytes=nbytes, width=width, magnitude=mask)
                yield _Named(tensor.name, span.path, piece)


def _scan_of(tensor: StoredTensor, pieces: Sequence[Piece]) -> WeightScan | None:
    if sum(piece.nbytes for piece in pieces) != sum(span.nbytes for span in tensor.spans):
        return None
    layout, largest = LAYOUTS.get(tensor.dtype), max((piece.largest for piece in pieces), default=0)
    if layout is None:
        code = min(NOT_FINITE.get(tensor.dtype, b""), default=None)
        finite = code is None or largest < code
        return WeightScan(all_zero=tensor.nbytes > 0 and largest == 0) if finite else None
    if largest >= layout.infinity:
        return None
    zero = tensor.spec.numel > 0 and largest == 0
    same = tensor.spec.numel > 1 and all(not each.differing and each.first == pieces[0].first for each in pieces)
    return WeightScan(
        all_zero=zero,
        constant=same and not zero,
        largest=layout.number(largest) if largest >= layout.large else 0.0,
    )
