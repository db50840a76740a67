"""A matrix that goes transposed from file to file: every element in its place, in blocks of any size, and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lora_tool.execution.kernels import STORAGE
from lora_tool.execution.native import turned_files
from lora_tool.execution.native.library import Kernel
from lora_tool.execution.native.turned_files import InFile, turn_on
from lora_tool.formats.room import Room
from lora_tool.tensors import DType

BEFORE, AFTER = b"header", b"the next tensor"


@contextlib.contextmanager
def opened(
    source: Path, target: Path, types: tuple[DType, DType], size: tuple[int, int], made: tuple[int, int]
) -> Iterator[tuple[InFile, InFile]]:
    with source.open("rb") as read, target.open("r+b") as written:
        yield (
            InFile(descriptor=read.fileno(), begin=len(BEFORE), shape=size, dtype=types[0]),
            InFile(descriptor=written.fileno(), begin=len(BEFORE), shape=made, dtype=types[1]),
        )


def blank(path: Path, nbytes: int) -> None:
    path.write_bytes(BEFORE + b"\xaa" * nbytes + AFTER)


@pytest.mark.parametrize("block", [16, 600, 1 << 20])
@pytest.mark.parametrize("size", [(4, 300), (300, 4), (40, 40), (1, 9), (9, 1)], ids=str)
@pytest.mark.parametrize(
    "types", [(DType.F32, DType.F32), (DType.BF16, DType.BF16), (DType.F16, DType.F32), (DType.F64, DType.F16)], ids=str
)
def test_every_element_gets_to_its_place(
    kernels: tuple[Kernel, ...],
    types: tuple[DType, DType],
    size: tuple[int, int],
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turned_files, "TURNED_BYTES", block)
    stored = (np.arange(size[0] * size[1]).reshape(size) % 113).astype(STORAGE[types[0]])
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(BEFORE + stored.tobytes() + AFTER)
    first, last = size[1] // 3, size[1]
    for kernel in kernels:
        for longer in (0, 5):  # rows of the output that have zeros at their end
            expected = np.zeros((last - first, size[0] + longer), STORAGE[types[1]])
            expected[:, : size[0]] = stored.T[first:last].astype(np.float64) * 2
            blank(target, expected.nbytes)
            with opened(source, target, types, size, expected.shape) as (matrix, out):
                is_written = turn_on(kernel, matrix, out, first, 2.0, Room())
            assert is_written is not (longer > 0 and size[0] > size[1])
            if not is_written:
                continue
            assert target.read_bytes() == BEFORE + expected.tobytes() + AFTER


@pytest.mark.parametrize("size", [(4, 300), (300, 4)], ids=str)
def test_what_cannot_be_written_is_told(
    kernels: tuple[Kernel, ...], size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turned_files, "TURNED_BYTES", 600)
    stored = np.ones(size, np.float32)
    source, target = tmp_path / "source", tmp_path / "target"
    blank(target, stored.nbytes)
    for kernel in kernels:
        source.write_bytes(BEFORE + stored.tobytes())
        with opened(source, target, (DType.F32, DType.F32), size, size[::-1]) as (matrix, out):
            assert turn_on(kernel, matrix, out, 0, 1.0, Room())
            assert not turn_on(
                kernel, matrix, replace(out, descriptor=matrix.descriptor), 0, 1.0, Room()
            )  # to read only
            os.truncate(source, source.stat().st_size - 1)
            assert not turn_on(kernel, matrix, out, 0, 1.0, Room())
            broken = np.where(np.arange(size[1]) == size[1] - 1, np.nan, stored).astype("<f4")
            source.write_bytes(BEFORE + broken.tobytes())
            assert not turn_on(kernel, matrix, out, 0, 1.0, Room())
