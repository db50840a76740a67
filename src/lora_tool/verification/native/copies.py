"""The compiled comparison of copies with their sources, tested once before it is used. `compare.c` says what it does.

Where it was not built, or `LORA_TOOL_KERNEL` is `off`, numpy compares.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.small_library import functions_of, is_off
from lora_tool.verification.native import FILE, VERSION

MOST_BYTES = 1 << 20
"""Of a copy that are compared together."""
_LEAST_BYTES = 1 << 16
"""Memory for each copy, at least: for a sample of a transposed matrix many times its bytes are read from the source, up to
twice this at a time."""
_WIDTHS = (1, 2, 4, 8)
_TRIAL = (5, 7)
"""Rows and columns of the matrix that it is tried with."""
_TRIAL_BYTES, _VARIED = (math.prod(_TRIAL) + 1) * _WIDTHS[-1], 64
"""Bytes that its elements lie in, and how many different ones are among them."""


class Copy(ctypes.Structure):
    """`struct copy` of `compare.c`: bytes of a file, where those are that they should be, and what of them differs."""

    _fields_ = (
        ("at", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("source", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("differing", ctypes.c_int64),
    )
    nbytes: int
    first: int
    differing: int


class CopyComparison(Struct, frozen=True):
    """The compiled comparison of copies. Calls give the interpreter lock away, and are safe from several threads."""

    function: Any

    def look(self, file: int, source: int, copies: Sequence[Copy]) -> tuple[Copy, ...]:
        """Return those of the copies, in their order, that both files could be read for, with what was seen of them."""
        some = (Copy * len(copies))(*copies)
        most = max(_LEAST_BYTES, min(MOST_BYTES, max((each.nbytes for each in copies), default=0)))
        done: int = self.function(file, source, some, len(copies), ctypes.create_string_buffer(3 * most), most)
        return tuple(some[:done])


def copy_comparison() -> CopyComparison | None:
    """Return the compiled comparison of copies, None where numpy is to compare."""
    return None if is_off() else loaded(FILE)


@lru_cache
def loaded(file: Path) -> CopyComparison | None:
    """Return the comparison of this library; None where it is not there, of another version, or fails its test."""
    functions = functions_of(file, VERSION, "lora_tool_compare", "lora_tool_copies")
    if functions is None:
        return None
    _, function = functions
    pointer = ctypes.c_void_p
    function.argtypes = [ctypes.c_int, ctypes.c_int, pointer, ctypes.c_int64, pointer, ctypes.c_int64]
    function.restype = ctypes.c_int64
    found = CopyComparison(function)
    return found if _tells_apart(found, file) else None


def _tells_apart(found: CopyComparison, file: Path) -> bool:
    """Return whether it sees in bytes of its own file what Python sees, at every width, and that others are not there."""
    data = file.read_bytes()
    places = range(0, len(data) - _TRIAL_BYTES, _TRIAL_BYTES)
    begin = next((at for at in places if len({*data[at : at + _TRIAL_BYTES]}) > _VARIED), 0)
    tried = [copy for width in _WIDTHS for copy in _tried(data, begin, width)]
    beyond = Copy(at=len(data), nbytes=1, source=0, width=1)
    with file.open("rb") as opened:
        seen = found.look(opened.fileno(), opened.fileno(), [*(copy for copy, _ in tried), beyond])
    return [(copy.first, copy.differing) for copy in seen] == [known for _, known in tried]


def _tried(data: bytes, begin: int, width: int) -> Iterator[tuple[Copy, tuple[int, int]]]:
    """Yield copies of elements of the library's own bytes from `begin`, and what is to be seen of each."""
    rows, columns = _TRIAL
    nbytes = rows * columns * width
    for source in (begin, begin + width, begin + 1):
        lies = [source + at for at in range(0, nbytes, width)]
        turned = [source + (column * rows + row) * width for row in range(rows) for column in range(columns)]
        for places, shape in ((lies, (0, 0)), (turned, _TRIAL)):
            for first, last in ((0, rows * columns), (3, 5), (columns - 1, 3 * columns + 1), (columns, 2 * columns)):
                offsets = [begin + at * width for at in range(first, last)]
                off = [
                    at * width
                    for at, (one, other) in enumerate(zip(offsets, places[first:last], strict=True))
                    if data[one : one + width] != data[other : other + width]
                ]
                copy = Copy(
                    at=offsets[0],
                    nbytes=(last - first) * width,
                    source=source if shape[0] else places[first],
                    start=first * width if shape[0] else 0,
                    rows=shape[0],
                    columns=shape[1],
                    width=width,
                )
                yield copy, (off[0] if off else 0, len(off))
