"""Matrices that the compiled kernel transposes from file to file, in one call. `products.h` says what it does."""

from __future__ import annotations

import ctypes

from msgspec import Struct

from lora_tool.execution.native.library import WIDE_TYPES, Kernel
from lora_tool.execution.output import WRITE_BYTES
from lora_tool.formats.room import Room
from lora_tool.formats.stored import as_in_the_file
from lora_tool.plan.core.factor_ops import Beside, Columns
from lora_tool.plan.core.ops import Cast, RowOp
from lora_tool.tensors import DType, StoredTensor

_MATRIX = 2
TURNED_BYTES = 4 << 20
"""Of a matrix that are turned round together: all of a factor at usual ranks, which is then read and written in one piece."""


class _Turning(ctypes.Structure):
    """`struct turning` of `products.h`."""

    _fields_ = (
        ("begin", ctypes.c_int64),
        ("to", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("high", ctypes.c_int64),
        ("wide", ctypes.c_int64),
        ("line", ctypes.c_int64),
        ("some", ctypes.c_int64),
        ("read", ctypes.c_void_p),
        ("made", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("source", ctypes.c_int32),
        ("out", ctypes.c_int32),
        ("source_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )


class InFile(Struct, frozen=True, kw_only=True):
    """A matrix, [rows, columns], where it lies in an open file, or is to lie."""

    descriptor: int
    begin: int
    shape: tuple[int, int]
    dtype: DType


def turned(op: RowOp) -> tuple[StoredTensor, Columns] | None:
    """Return a matrix as it lies in a file, transposed, and the columns of it as they are meant, where these are all that
    the operation writes but zeros after them.
    """
    match op:
        case Cast(source=source) if len(source.shape) == _MATRIX:
            part = Columns(tensor=source, count=source.shape[1])
        case Beside(parts=(part,), leading=0) if part.count == part.tensor.shape[1]:
            pass
        case _:
            return None
    stored, is_turned = as_in_the_file(part.tensor)
    return (stored, part) if is_turned and stored.dtype in WIDE_TYPES and stored.spec.numel > 0 else None


def turn_on(kernel: Kernel, stored: InFile, out: InFile, first: int, scale: float, room: Room) -> bool:
    """Write columns of a matrix from `first` on as the rows of `out`, with zeros after them if those are longer.

    Each number times `scale`, rounded once. Return False where not all could be written: a value is not finite, the
    system refused, or longer rows would be of a high matrix.
    """
    (rows, columns), (count, stride) = stored.shape, out.shape
    sizes, is_high = (stored.dtype.bits // 8, out.dtype.bits // 8), rows > columns
    if is_high and stride != rows:
        return False
    if is_high:  # in rows, as they lie in the file
        high, wide, line = min(rows, max(1, TURNED_BYTES // (columns * sizes[0]))), count, columns
    else:  # in columns, which are whole rows of the output
        high = rows
        line = wide = min(count, max(1, TURNED_BYTES // (rows * sizes[0])))
    turning = _Turning(
        begin=stored.begin,
        to=out.begin,
        rows=rows,
        columns=columns,
        first=first,
        last=first + count,
        stride=stride,
        high=high,
        wide=wide,
        line=line,
        some=WRITE_BYTES,
        read=room.address("read", high * line * sizes[0]),
        made=room.address("result", wide * (stride if high == rows else high) * sizes[1]),
        scale=scale,
        source=stored.descriptor,
        out=out.descriptor,
        source_type=WIDE_TYPES[stored.dtype],
        out_type=WIDE_TYPES[out.dtype],
    )
    written: int = kernel.library.lora_tool_turn_pass(kernel.level.number, ctypes.addressof(turning))
    return bool(written)
