"""Reading spans of the inputs: a bounded number of open files, each checked against what the plan saw."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.errors import SourceChanged
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.stored import fill
from lora_tool.tensors import FileStamp, StoredTensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from lora_tool.formats.quantised.encodings import Encoding
    from lora_tool.formats.quantised.numpy_types import Array, Read


class Sources(OpenFiles):
    """The input files of a plan, opened when they are read. A context manager; safe to read from several threads."""

    def __init__(self, stamps: Iterable[FileStamp]) -> None:
        super().__init__(self._opened)
        self._stamps = {stamp.path: stamp for stamp in stamps}

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
        fill(buffer, tensor, start, self.read_exactly, _decoded)

    def held_bytes(self, path: Path, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002 - see `SharedSources`
        """Return these bytes of a file if they are in memory already, else None."""
        return None


def _decoded(encoding: Encoding, first: int, last: int, read: Read) -> Array:
    """Return rows of what quantised weights stand for, by the compiled kernel where there is one."""
    from lora_tool.execution.native.dequantising import arithmetic  # noqa: PLC0415 - for quantised weights alone
    from lora_tool.formats.quantised.decoding import decoded  # noqa: PLC0415 - see above

    return decoded(encoding, first, last, read, arithmetic())
