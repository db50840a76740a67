"""Computed tensors that wait in a file until they are written: memory holds none of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec


class FileSpool:
    """Float32 tensors one after the other in a new file of `folder`. Safe for threads."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "factors"
        self._lock = threading.Lock()
        self._end = 0
        self._path.touch()

    def add(self, name: str, values: npt.NDArray[Any]) -> StoredTensor:
        """Append the array, and return it as a tensor of that name. Raises OSError."""
        data = np.ascontiguousarray(values, "<f4")
        with self._lock, self._path.open("ab") as file:
            file.write(data.data)
            begin, self._end = self._end, self._end + data.nbytes
        spec = TensorSpec(name=name, dtype=DType.F32, shape=data.shape)
        return StoredTensor(spec=spec, spans=(Span(path=self._path, offset=begin, nbytes=data.nbytes),))

    def stamps(self) -> tuple[FileStamp, ...]:
        """Return the file's stamp now."""
        return (FileStamp.of(self._path),)
