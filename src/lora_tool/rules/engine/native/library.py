"""The compiled scan: found beside this file, tested once, and called for pieces of files. `scan.c` says what it does.

It shares nothing with the kernel that writes. Where it was not built, or `LORA_TOOL_KERNEL` is `off`, Python scans.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from lora_tool.small_library import functions_of, is_off

FILE = Path(__file__).with_name("scan.so")
"""What `build_kernel.py` makes of `scan.c`."""
VERSION = 2
"""Of the functions in `scan.c`."""
_TRIAL, _VARIED = 8 * 37, 96
"""Bytes that it is tried with, no whole number of vectors of anything, and how many different ones are among them."""
_LETTERS: tuple[tuple[int, Literal["B", "H", "I", "Q"]], ...] = ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))
"""Integers of so many bytes, as `memoryview.cast` calls them."""


class Piece(ctypes.Structure):
    """Elements of `width` bytes that lie in one piece in a file, and what a call saw of them: see `scan.c`.

    The bits `magnitude` are those that are not the sign.
    """

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("magnitude", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("largest", ctypes.c_uint64),
        ("differing", ctypes.c_uint64),
    )
    offset: int
    nbytes: int
    width: int
    magnitude: int
    first: int
    largest: int
    differing: int


class CompiledScan(Struct, frozen=True):
    """The compiled scan. Calls give the interpreter lock away, and are safe from several threads."""

    function: Any

    def look(self, descriptor: int, pieces: Sequence[Piece], block: Any) -> tuple[Piece, ...]:  # noqa: ANN401 - ctypes' memory
        """Return those of the pieces that could be read, with what was seen of them; `block` is what they are read into."""
        some = (Piece * len(pieces))(*pieces)
        done: int = self.function(descriptor, some, len(pieces), block, ctypes.sizeof(block))
        return tuple(some[:done])


def compiled_scan() -> CompiledScan | None:
    """Return the compiled scan, None where Python is to scan."""
    return None if is_off() else loaded(FILE)


@functools.lru_cache
def loaded(file: Path) -> CompiledScan | None:
    """Return the scan of this library; None where it is not there, of another version, or fails its test."""
    functions = functions_of(file, VERSION, "lora_tool_scan")
    if functions is None:
        return None
    (function,) = functions
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    function.restype = ctypes.c_int64
    found = CompiledScan(function)
    return found if _tells_apart(found, file) else None


def _tells_apart(found: CompiledScan, file: Path) -> bool:
    """Return whether it sees in bytes of its own file what Python sees, at every width, and that others are not there."""
    data, block = file.read_bytes(), ctypes.create_string_buffer(64)
    beginnings = range(1, len(data) - _TRIAL, _TRIAL)
    at = next((each for each in beginnings if data[each] and len({*data[each : each + _TRIAL]}) > _VARIED), 0)
    with file.open("rb") as opened:
        for width, letter in _LETTERS:
            values = memoryview(data[at : at + _TRIAL // 8 * width]).cast(letter)
            magnitude = (1 << 8 * width - (width > 1)) - 1
            places = ((at, width), (at, values.nbytes), (len(data), 8))
            looked = found.look(opened.fileno(), [Piece(*place, width, magnitude) for place in places], block)
            seen = [(piece.first, piece.largest, piece.differing) for piece in looked]
            differing = functools.reduce(operator.or_, (value ^ values[0] for value in values))
            largest = max(value & magnitude for value in values)
            if seen != [(values[0], values[0] & magnitude, 0), (values[0], largest, differing)]:
                return False
    return True
