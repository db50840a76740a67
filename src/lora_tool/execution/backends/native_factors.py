"""Factors that are made of factors, compiled: in float64, each sum in the order of its products, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable

from lora_tool.execution import kernels
from lora_tool.execution.backends.stored_rows import StoredRows
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.native.library import Kernel
from lora_tool.execution.native.passing import write_array
from lora_tool.execution.native.products import mix, turn
from lora_tool.execution.native.turned_files import TURNED_BYTES, turned
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.exhaustive import assert_never
from lora_tool.formats.factor_rows import pieces
from lora_tool.formats.room import Room
from lora_tool.plan.core.factor_ops import Beside, Columns, FactorOp, Mix
from lora_tool.tensors import DType, StoredTensor


class NativeFactors:
    """Rows of factors, in the worker's `room`. What is not finite is left to numpy, which names it."""

    def __init__(
        self, kernel: Kernel, sources: Sources, read: StoredRows, room: Room, stopped: Callable[[], bool]
    ) -> None:
        self._kernel = kernel
        self._sources = sources
        self._read = read
        self._room = room
        self._stopped = stopped

    def write(self, unit: ComputeUnit, out: int) -> bool:
        """Write the unit where it is a product, or a matrix that is turned round; return whether all of it was written."""
        if isinstance(unit.op, Mix):
            return self._write_mix(unit, unit.op, out)
        found = turned(unit.op)
        return found is not None and self._write_turned(unit, *found, out)

    def rows(self, unit: ComputeUnit, op: FactorOp, first: int, last: int) -> Array | None:
        """Return rows of the factor in the type of the output, flat; None where one is not finite."""
        match op:
            case Beside():
                out = self._room.of("result", (last - first, op.shape[1]), kernels.STORAGE[unit.out.dtype])
                fine = self._write_beside(op, out, unit.out.dtype, first, last)
                return out.reshape(-1) if fine else None
            case Mix():
                return None  # see `write`: what it leaves is computed again, which names what is not finite
            case _:
                return assert_never(op)

    def _write_beside(self, op: Beside, out: Array, dtype: DType, first: int, last: int) -> bool:
        parts = sum(part.count for part in op.parts)
        out[:, : op.leading] = out[:, op.leading + parts :] = 0
        fine = True
        for part, place in zip(op.parts, op.places, strict=True):
            if not part.count:
                continue
            rows = self._read.rows(part.tensor, first, last, "factor").reshape(last - first, -1)
            fine &= self._kernel.scale(
                rows.ctypes.data + part.first * rows.itemsize,
                part.tensor.dtype,
                (rows.shape[1], part.step),
                out.ctypes.data + place.start * out.itemsize,
                dtype,
                (out.shape[1], place.step or 1),
                (last - first, part.count),
                part.scale,
            )
        return fine

    def _write_mix(self, unit: ComputeUnit, op: Mix, out: int) -> bool:
        """Write the unit, some rows of the parts at a time; return False, with some of it written, where a value is not finite.

        `below`, where these are columns, a row of the output needs all of them, and a unit is the whole output.
        """
        matrix, dtype = op.matrix.values, unit.out.dtype
        begin, end = (0, op.shape[1]) if op.below else (unit.first, unit.last)
        for first, some in pieces(op.parts, self._sources, self._room, below=op.below, begin=begin, end=end):
            if self._stopped():
                break
            stored = [
                (each.view(kernels.STORAGE[part.dtype]), part.dtype) for each, part in zip(some, op.parts, strict=True)
            ]
            count = len(some[0])
            shape = (op.shape[0], count) if op.below else (count, op.shape[1])
            made = self._room.of("result", shape, kernels.STORAGE[dtype])
            if not mix(self._kernel, stored, matrix, made, dtype, self._room, below=op.below):
                return False
            if not op.below:
                write_array(self._kernel, made, out, unit.at + first * unit.row_bytes)
            elif count == op.shape[1]:
                write_array(self._kernel, made, out, unit.at)
            else:
                for row, values in enumerate(made):
                    write_array(self._kernel, values, out, unit.at + row * unit.row_bytes + first * made.itemsize)
        return True

    def _write_turned(self, unit: ComputeUnit, stored: StoredTensor, part: Columns, out: int) -> bool:
        """Write a matrix that lies transposed in the file; return False where a value is not finite.

        The file is read in the order of its bytes, as often as blocks of the output are needed to hold all of it.
        """
        width = math.prod(unit.out.shape[1:])
        step = max(1, TURNED_BYTES // max(1, unit.row_bytes))
        for first in range(unit.first, unit.last, step):
            rows = slice(first, min(first + step, unit.last))
            made = self._room.of("result", (rows.stop - first, width), kernels.STORAGE[unit.out.dtype])
            made[:, part.count :] = 0
            for at, (some,) in pieces((stored,), self._sources, self._room, below=False):
                if self._stopped():
                    return True
                place = made[:, at : at + len(some)]
                if not turn(self._kernel, some[:, rows], stored.dtype, place, unit.out.dtype, part.scale):
                    return False
            write_array(self._kernel, made, out, unit.at + first * unit.row_bytes)
        return True
