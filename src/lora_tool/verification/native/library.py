"""The compiled comparison with what is recomputed: found beside this file and tested once. `compare.c` says what it does.

It shares nothing with the kernel that writes. Where it was not built, or `LORA_TOOL_KERNEL` is `off`, numpy compares.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.small_library import functions_of, is_off
from lora_tool.tensors import DType
from lora_tool.verification.native import FILE, VERSION

_TYPES = {DType.BF16: 0, DType.F16: 1, DType.F32: 2, DType.F64: 3}
Elements = tuple[NDArray[Any], DType]
"""Elements, or their bits, one after the other in memory, and their type."""

LISTED = 64
"""Places of values beyond the bound that one call tells."""


class Seen(ctypes.Structure):
    """What one call saw: sums of squares, the sum of moved·change, and errors in half units in the last place."""

    _fields_ = (
        ("error", ctypes.c_double),
        ("change", ctypes.c_double),
        ("moved", ctypes.c_double),
        ("dot", ctypes.c_double),
        ("largest", ctypes.c_double),
        ("is_moved", ctypes.c_int64),
        ("outside", ctypes.c_int64),
        ("places", ctypes.c_int64 * LISTED),
    )


class Comparison(Struct, frozen=True):
    """The compiled comparison. Calls give the interpreter lock away, and are safe from several threads."""

    function: Any

    def seen(self, stored: Elements, base: Elements, change: Elements, *, within: float) -> Seen:
        """Return what is seen of `stored` beside base + change, as many elements each.

        They are compared in float32 where the stored ones have 16 bits, else in float64. `within` is in half units in
        the last place: the largest error is that of the values within it, the others are counted and their places told.
        """
        each, seen = (stored, base, change), Seen()
        addresses = (ctypes.c_void_p * 3)(*(array.ctypes.data for array, _ in each))
        types = (ctypes.c_int * 3)(*(_TYPES[dtype] for _, dtype in each))
        count = stored[0].nbytes * 8 // stored[1].bits
        self.function(addresses, types, count, within, ctypes.addressof(seen))
        return seen


def comparison() -> Comparison | None:
    """Return the compiled comparison, None where numpy is to compare."""
    return None if is_off() else loaded(FILE)


@lru_cache
def loaded(file: Path) -> Comparison | None:
    """Return the comparison of this library; None where it is not there, of another version, or fails its test."""
    functions = functions_of(file, VERSION, "lora_tool_compare")
    if functions is None:
        return None
    (function,) = functions
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.c_int64, ctypes.c_double, pointer]
    found = Comparison(function)
    return found if _tells_apart(found) else None


def _tells_apart(found: Comparison) -> bool:
    """Return whether it finds the one value that is three halves of a unit off, wherever it stands, and nothing else."""
    count = 37
    right = np.full(count, 0x3F81, np.uint16), DType.BF16  # 1 + 2^-7, the next bfloat16 after 1
    base, change = np.ones(count, np.float32), np.full(count, 2.0**-7)
    for at in range(count):
        off = change.copy()
        off[at] += 3 * 2.0**-9
        for within, outside, largest in ((1.0, 1, 0.0), (1.5, 0, 1.5)):
            seen = found.seen(right, (base, DType.F32), (off, DType.F64), within=within)
            told = (seen.outside, seen.largest, seen.is_moved, seen.places[0]) == (outside, largest, 1, at * outside)
            if not told or seen.change != 2.0**-14 * (count + 2.0625):
                return False
    return True
