"""Reading what several plans take from the same inputs: once, into a block of memory that each thread has of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.errors import LoraToolError
from lora_tool.execution.reading import Sources
from lora_tool.tensors import FileStamp, Span, StoredTensor

if TYPE_CHECKING:
    from lora_tool.formats.quantised.coded import Scaled

MOST_HELD = 32 << 20
"""Bytes of a block. What is larger, a whole tensor that torch computes say, is read for each plan."""


class Block(Struct, frozen=True):
    """`nbytes` bytes of a tensor from its byte `start`; of a file where it is no `tensor`."""

    of: StoredTensor | Path
    start: int
    nbytes: int

    @classmethod
    def of_tensor(cls, tensor: StoredTensor, start: int, nbytes: int) -> Block:
        """Return where the bytes are: in the file, where the tensor lies in it as it is meant."""
        span = tensor.spans[0]
        if len(tensor.spans) == 1 and type(span) is Span:
            return cls(span.path, span.offset + start, nbytes)
        return cls(tensor, start, nbytes)

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for equal blocks, and cheap to compare."""
        of = self.of if isinstance(self.of, Path) else (self.of.name, self.of.path, self.of.spans[0].offset)
        return of, self.start, self.nbytes

    def holds(self, other: Block) -> bool:
        """Return whether the bytes of `other` are among these."""
        if other.start < self.start or other.start + other.nbytes > self.start + self.nbytes:
            return False
        if isinstance(self.of, Path) or isinstance(other.of, Path):
            return self.of == other.of
        return self.of is other.of or self.of == other.of


class _Held(threading.local):
    """This thread's block and its bytes."""

    block: Block | None = None
    data: memoryview = memoryview(b"")
    buffer: bytearray = bytearray()


class SharedSources(Sources):
    """See `Sources`. Each thread can hold a block, which is then read from memory; quantised weights are decoded once."""

    def __init__(self, stamps: Iterable[FileStamp]) -> None:
        super().__init__(stamps)
        self._block = _Held()

    @contextlib.contextmanager
    def holding(self, block: Block) -> Iterator[None]:
        """Hold the block in this thread meanwhile. Where it cannot be read, those who need it say so."""
        held = self._block
        if len(held.buffer) < block.nbytes:
            held.buffer = bytearray(block.nbytes)
        data = memoryview(held.buffer)[: block.nbytes]
        with contextlib.suppress(OSError, LoraToolError):
            if isinstance(block.of, Path):
                self.read_exactly(block.of, block.start, data)
            else:
                super().read_into(block.of, block.start, data)
            held.block, held.data = block, data
        try:
            yield
        finally:
            held.block, held.data = None, memoryview(b"")

    def read_into(self, tensor: StoredTensor, start: int, buffer: memoryview) -> None:
        """See `Sources`."""
        found = self._found(Block.of_tensor(tensor, start, len(buffer))) if self._block.block else None
        if found is None:
            super().read_into(tensor, start, buffer)
        else:
            buffer[:] = found

    def coded(self, tensor: StoredTensor, first: int, last: int) -> Scaled | None:
        """See `Sources`: what is held is decoded already."""
        return None if self._block.block is not None else super().coded(tensor, first, last)

    def place(self, tensor: StoredTensor, start: int, nbytes: int) -> tuple[Path, int] | None:
        """See `Sources`: what is held is read from memory."""
        return None if self._block.block is not None else super().place(tensor, start, nbytes)

    def held_bytes(self, path: Path, offset: int, nbytes: int) -> memoryview | None:
        """See `Sources`."""
        return self._found(Block(path, offset, nbytes))

    def _found(self, wanted: Block) -> memoryview | None:
        block = self._block.block
        if block is None or not block.holds(wanted):
            return None
        at = wanted.start - block.start
        return self._block.data[at : at + wanted.nbytes]
