"""What can be wrong with the values of a checkpoint: each byte that will be used is read once, in blocks.

The zip directory holds a CRC32 of every record; nobody else compares it. Padding is read for the CRC alone, as it is
memory that happened to be there.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lora_tool.formats.files import open_regular
from lora_tool.formats.torch_zip import Record
from lora_tool.report import Finding, Severity
from lora_tool.tensors import DType, StoredTensor

BLOCK_BYTES = 1 << 20
"""Read at a time, per worker: small enough that the second look at a block finds it in the second-level cache."""


class _Piece(NamedTuple):
    """Bytes `begin` to `end` of a file, which belong to the tensor `name`."""

    begin: int
    end: int
    name: str
    dtype: DType


def value_faults(
    tensors: Mapping[str, StoredTensor], records: Iterable[Record], *, masters: frozenset[str]
) -> list[Finding]:
    """Return what is wrong with the values of `tensors`: LT411 CRC, LT412 not finite, LT413 a rank's masters all zero.

    `records` are the archive members that hold them; `masters` the names of the trained tensors.
    """
    pieces: dict[Path, list[_Piece]] = defaultdict(list)
    for tensor in tensors.values():
        for span in tensor.spans:
            pieces[span.path].append(_Piece(span.offset, span.offset + span.nbytes, tensor.name, tensor.dtype))
    by_path: dict[Path, list[Record]] = defaultdict(list)
    for record in dict.fromkeys(records):
        by_path[record.path].append(record)
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as workers:
        runs = workers.map(lambda path: list(_file_faults(path, by_path[path], sorted(pieces[path]), masters)), by_path)
        return [fault for run in runs for fault in run]


def _file_faults(path: Path, records: list[Record], pieces: list[_Piece], masters: frozenset[str]) -> Iterator[Finding]:
    bad: dict[str, None] = {}
    trained = nonzero = False
    buffer = bytearray(BLOCK_BYTES)
    at = 0
    with open_regular(path) as fd:
        for start, record in sorted((record.data_at(), record) for record in records):
            crc, done = 0, 0
            while done < record.nbytes:
                view = memoryview(buffer)[: min(BLOCK_BYTES, record.nbytes - done)]
                if os.preadv(fd, [view], start + done) != len(view):
                    break
                crc = zlib.crc32(view, crc)
                begin, end = start + done, start + done + len(view)
                while at < len(pieces) and pieces[at].end <= begin:
                    at += 1
                for piece in _overlapping(pieces, at, end):
                    block = view[max(piece.begin, begin) - begin : min(piece.end, end) - begin]
                    finite, some = _look_at(block, piece.dtype)
                    bad.update({} if finite else {piece.name: None})
                    if piece.name in masters:
                        trained, nonzero = True, nonzero or some
                done += len(view)
            if crc != record.crc:
                message = (
                    f"its CRC32 is {crc:08x}, the archive says {record.crc:08x}: the file was damaged after saving"
                )
                yield _error("LT411", path, message, record.name, "copy the file again from where it was saved")
    for name in bad:
        yield _error("LT412", path, "holds NaN or infinity", name, "the run had diverged; take an earlier tag: --tag T")
    if trained and not nonzero:
        yield _error("LT413", path, "every master weight of this rank is zero: it was never written", None, None)


def _overlapping(pieces: list[_Piece], at: int, end: int) -> Iterator[_Piece]:
    while at < len(pieces) and pieces[at].begin < end:
        if pieces[at].end > pieces[at].begin:
            yield pieces[at]
        at += 1


def _error(code: str, path: Path, message: str, subject: str | None, hint: str | None) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, path=str(path), message=message, subject=subject, hint=hint)


_BITS: Mapping[DType, tuple[Any, int]] = {
    DType.BF16: (np.dtype("<u2"), 0x7F80),
    DType.F16: (np.dtype("<u2"), 0x7C00),
    DType.F64: (np.dtype("<u8"), 0x7FF0 << 48),
}
"""Storage and exponent of float types: all ones means NaN or infinity."""


def _look_at(block: memoryview, dtype: DType) -> tuple[bool, bool]:
    """Return whether all elements are finite, and whether any is not zero."""
    if dtype is DType.F32 and len(block) % 4 == 0:
        values = np.frombuffer(block, "<f4")
        with np.errstate(all="ignore"):
            squares = float(np.dot(values, values))
        # finite for sure if the sum of squares is; a sum of zero may also be an underflow
        return np.isfinite(squares) or bool(np.isfinite(values).all()), squares > 0 or bool(values.any())
    if dtype not in _BITS:
        return True, True
    storage, exponent = _BITS[dtype]
    bits = np.frombuffer(block, storage)
    return not bool(((bits & exponent) == exponent).any()), True
