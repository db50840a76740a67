"""Whole factors in the compiled kernel: Gram matrices, and products with a small matrix. `products.h` says what they are.

Plans compute with the first, which decide about ranks, and the writer with the second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.execution.native.library import WIDE_TYPES, Kernel
from lora_tool.formats.room import Room
from lora_tool.tensors import DType

Stored = tuple[NDArray[Any], DType]
"""Stored elements, [rows, columns], whichever way round they lie in memory, and what they are."""
Doubles = NDArray[np.float64]


class _Part(ctypes.Structure):
    """`struct part` of `products.h`."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("along", ctypes.c_int64),
        ("down", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("type", ctypes.c_int32),
    )


class GramSum(Struct, eq=False, dict=True):
    """PᵀP in float64, of the rows of parts that stand side by side: some rows at a time, all in one order."""

    kernel: Kernel
    depth: int
    """Columns of all parts."""
    room: Room

    @cached_property
    def _sums(self) -> Doubles:
        needed = functions(self.kernel.library).lora_tool_gram_sums(self.kernel.level.number, self.depth)
        sums = self.room.of("sums", (needed,), np.dtype(np.float64))
        sums[:] = 0
        return sums

    def add(self, parts: Sequence[Stored]) -> None:
        """Add the products of these rows of each part."""
        library, level = functions(self.kernel.library), self.kernel.level.number
        work = self.room.of("gram", (library.lora_tool_gram_room(level, self.depth),), np.dtype(np.float64))
        library.lora_tool_gram(
            level, _listed(parts), len(parts), len(parts[0][0]), self._sums.ctypes.data, work.ctypes.data
        )

    def matrix(self) -> Doubles:
        """Return the Gram matrix of what was added, [depth, depth]."""
        gram = np.empty((self.depth, self.depth))
        level = self.kernel.level.number
        functions(self.kernel.library).lora_tool_gram_matrix(
            level, self._sums.ctypes.data, self.depth, gram.ctypes.data
        )
        return gram


def mix(
    kernel: Kernel,
    parts: Sequence[Stored],
    matrix: Doubles,
    out: NDArray[Any],
    dtype: DType,
    room: Room,
    *,
    below: bool,
) -> bool:
    """Write P·X at `out`, [rows, columns of X], or, `below`, its transposed, of the rows of parts side by side.

    `matrix` is X, in whose rows elements lie one after the other; so do they in those of `out`, whose elements are
    rounded once to `dtype`. Return False where one is NaN or infinite.
    """
    library, level, depth = functions(kernel.library), kernel.level.number, len(matrix)
    needed = library.lora_tool_mix_room(level, depth, matrix.shape[1])
    flagged: int = library.lora_tool_mix(
        level,
        _listed(parts),
        len(parts),
        len(parts[0][0]),
        matrix.ctypes.data,
        matrix.strides[0] // matrix.itemsize,
        matrix.shape[1],
        below,
        out.ctypes.data,
        WIDE_TYPES[dtype],
        out.strides[0] // out.itemsize,
        room.of("mix", (needed,), np.dtype(np.float64)).ctypes.data,
    )
    return flagged == 0


def turn(
    kernel: Kernel, stored: NDArray[Any], source_type: DType, out: NDArray[Any], dtype: DType, scale: float
) -> bool:
    """Write a matrix transposed at `out`, times `scale`, rounded once; return False where a value is NaN or infinite.

    In rows of both, elements lie one after the other.
    """
    flagged: int = functions(kernel.library).lora_tool_turn(
        kernel.level.number,
        stored.ctypes.data,
        WIDE_TYPES[source_type],
        stored.strides[0] // stored.itemsize,
        out.ctypes.data,
        WIDE_TYPES[dtype],
        out.strides[0] // out.itemsize,
        *stored.shape,
        scale,
    )
    return flagged == 0


def _listed(parts: Sequence[Stored]) -> Any:  # noqa: ANN401 - an array of ctypes
    return (_Part * len(parts))(
        *(
            _Part(
                stored.ctypes.data,
                stored.strides[0] // stored.itemsize,
                stored.strides[1] // stored.itemsize,
                stored.shape[1],
                WIDE_TYPES[dtype],
            )
            for stored, dtype in parts
        )
    )


@cache
def functions(library: Any) -> Any:  # noqa: ANN401 - ctypes gives functions by name
    """Return the library, whose functions for whole factors know the types of their arguments."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.lora_tool_gram_sums.argtypes = [number, size]
    library.lora_tool_gram_room.argtypes = [number, size]
    library.lora_tool_gram.argtypes = [number, pointer, size, size, pointer, pointer]
    library.lora_tool_gram_matrix.argtypes = [number, pointer, size, pointer]
    library.lora_tool_mix_room.argtypes = [number, size, size]
    library.lora_tool_mix.argtypes = [
        number, pointer, size, size, pointer, size, size, number, pointer, number, size, pointer,
    ]  # fmt: skip
    library.lora_tool_turn.argtypes = [
        number, pointer, number, size, pointer, number, size, size, size, ctypes.c_double,
    ]  # fmt: skip
    for name in ("gram_sums", "gram_room", "mix_room"):
        getattr(library, f"lora_tool_{name}").restype = size
    return library
