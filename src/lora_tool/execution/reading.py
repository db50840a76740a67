"""Reading spans of the inputs: a bounded number of open files, each checked against its stamp in the plan."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.core.errors import SourceChanged
from lora_tool.core.tensors import FileStamp, Span, StoredTensor
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.quantised.encodings import rows_within
from lora_tool.formats.stored import fill

if TYPE_CHECKING:
    from typing_extensions import Self

    from lora_tool.formats.quantised.arrays import Array, Bytes, ReadRows, Strips
    from lora_tool.formats.quantised.coded import Scaled
    from lora_tool.formats.quantised.encodings import Encoding


class _Buffers(threading.local):
    """This thread's memory for the parts of coded rows, in the order in which they are read."""

    def __init__(self) -> None:
        self.buffers: list[Bytes] = []
        self.number = 0


class Sources(OpenFiles):
    """The input files of a plan, opened when they are read. A context manager; safe to read from several threads."""

    def __init__(self, stamps: Iterable[FileStamp]) -> None:
        super().__init__(self._opened)
        self._stamps = {stamp.path: stamp for stamp in stamps}
        self._strips: Strips | None = None
        self._read_again = _Buffers()

    def __enter__(self) -> Self:
        self.check_unchanged()
        return self

    def check_unchanged(self) -> None:
        """Raise `SourceChanged` if any input is not as the plan saw it."""
        for path in self._stamps:
            self._check(path, FileStamp.of(path))
        for path, descriptor in self.held().items():
            self._check(path, FileStamp.from_stat(path, os.fstat(descriptor)))

    def _check(self, path: Path, now: FileStamp) -> None:
        stamp = self._stamps[path]
        if not now.is_same(stamp):
            raise SourceChanged(
                f"{path} changed while it was read: {stamp.difference(now)}",
                hint="run again once nothing writes to it",
            )

    def _opened(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check(path, FileStamp.from_stat(path, os.fstat(descriptor)))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read_into(self, tensor: StoredTensor, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the tensor's bytes from its byte `start`."""
        fill(buffer, tensor, start, self.read_exactly, self._decoded)

    def bytes_of(self, tensor: StoredTensor, start: int, nbytes: int) -> Bytes:
        """Return the tensor's bytes from its byte `start`, as a new array."""
        import numpy as np  # only for quantised weights

        raw = np.empty(nbytes, np.uint8)
        self.read_into(tensor, start, raw.data)
        return raw

    def coded(self, tensor: StoredTensor, first: int, last: int) -> Scaled | None:
        """Return rows of a matrix as codes with their scales; None where they are not quantised, or not only that.

        They are valid until this thread asks for the next.
        """
        found = rows_within(tensor, first, last)
        if found is None:
            return None
        from lora_tool.formats.quantised.coded import coded  # only for quantised weights

        self._read_again.number = 0
        parts = coded(*found, self._bytes_again) or ()
        return parts[0] if len(parts) == 1 else None

    def coded_in_file(self, tensor: StoredTensor, first: int, last: int) -> tuple[Scaled, tuple[Path, int]] | None:
        """Return what `coded` does with nothing read of its codes, and where these begin; None as `coded` and `place`."""
        found = rows_within(tensor, first, last)
        if found is None:
            return None
        import numpy as np  # only for quantised weights

        from lora_tool.formats.quantised.coded import coded

        places: list[tuple[Path, int] | None] = []

        def scales_alone(of: StoredTensor, start: int, nbytes: int) -> Bytes:
            if of is not found[0].codes:
                return self.bytes_of(of, start, nbytes)
            places.append(self.place(of, start, nbytes))
            return np.broadcast_to(np.uint8(0), nbytes)

        parts = coded(*found, scales_alone) or ()
        place = places[0] if len(parts) == len(places) == 1 and parts[0].as_stored else None
        return None if place is None else (parts[0], place)

    def place(self, tensor: StoredTensor, start: int, nbytes: int) -> tuple[Path, int] | None:
        """Return the file and the offset of a tensor's bytes; None where they are not one piece, as they are meant."""
        spans = tuple(tensor.part(start, nbytes))
        return (spans[0].path, spans[0].offset) if len(spans) == 1 and type(spans[0]) is Span else None

    def _bytes_again(self, tensor: StoredTensor, start: int, nbytes: int) -> Bytes:
        """Return what `bytes_of` does, in the memory of this thread's last `coded` rows: new memory costs as much."""
        import numpy as np  # only for quantised weights

        held = self._read_again
        if held.number == len(held.buffers):
            held.buffers.append(np.empty(0, np.uint8))
        if held.buffers[held.number].size < nbytes:
            held.buffers[held.number] = np.empty(nbytes, np.uint8)
        raw = held.buffers[held.number][:nbytes]
        held.number += 1
        self.read_into(tensor, start, raw.data)
        return raw

    def _decoded(self, encoding: Encoding, first: int, last: int, read: ReadRows) -> Array:
        """Return rows of what quantised weights stand for, by the compiled kernel where there is one."""
        from lora_tool.formats.quantised.arrays import Strips
        from lora_tool.formats.quantised.decoding import decoded  # only for quantised weights
        from lora_tool.native.quantised import arithmetic

        self._strips = self._strips or Strips()
        return decoded(encoding, first, last, read, arithmetic(), self._strips)
