"""Factors that are made of factors, compiled: in float64, each sum in the order of its products, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from lora_tool.execution import kernels
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.native.library import kernel
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.exhaustive import assert_never
from lora_tool.formats.stored import read_columns
from lora_tool.plan.core.factor_ops import Beside, FactorOp, Mix, SmallMatrix
from lora_tool.plan.core.ops import Precision
from lora_tool.tensors import DType, StoredTensor

_STRIP = 1 << 9
"""Rows of B's, or columns of A's, that are packed at a time: what is packed stays in the second-level cache."""
_READ = 4 * _STRIP
"""Those that are read at a time: each row of columns of A's is a read of its own."""
_DOUBLE = np.dtype(np.float64)


class NativeFactors(NumpyBackend):
    """The part of `NativeBackend` that computes factors."""

    factor_blocks: ClassVar[int] = 2

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        super().__init__(sources, precision, stopped)
        found = kernel()
        if found is None:
            raise AssertionError("no kernel: `backend_for` should have chosen another backend")
        self._kernel = found

    def _factor(self, unit: ComputeUnit, op: FactorOp, first: int, last: int) -> Array | None:
        """Return rows of the factor in the type of the output, flat; None where one is not finite."""
        out = self._buffer("result", (last - first, op.shape[1]), kernels.STORAGE[unit.out.dtype])
        match op:
            case Beside():
                fine = self._write_beside(op, out, unit.out.dtype, first, last)
            case Mix(below=True):
                fine = self._write_below(op, out, unit.out.dtype, first, last)
            case Mix():
                fine = self._write_mixed(op, out, unit.out.dtype, first, last)
            case _:
                assert_never(op)
        return out.reshape(-1) if fine else None

    def _write_beside(self, op: Beside, out: Array, dtype: DType, first: int, last: int) -> bool:
        parts = sum(part.count for part in op.parts)
        out[:, : op.leading] = out[:, op.leading + parts :] = 0
        fine = True
        for part, place in zip(op.parts, op.places, strict=True):
            if not part.count:
                continue
            rows = self._rows(part.tensor, first, last, "factor").reshape(last - first, -1)
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

    def _write_mixed(self, op: Mix, out: Array, dtype: DType, first: int, last: int) -> bool:
        right = self._packed_matrix(op.matrix, self._kernel.wide_columns, 0, op.matrix.columns)
        fine = True
        held: list[Array] = []
        for at, end in _strips(first, last):
            inside = (at - first) % _READ
            if not inside:
                held = [
                    self._rows(part, at, min(at + _READ, last), f"part {n} of some") for n, part in enumerate(op.parts)
                ]
            left = self._panels("strip", end - at, op.matrix.rows, self._kernel.rows)
            deep = 0
            for part, stored in zip(op.parts, held, strict=True):
                rows = stored[inside : inside + end - at]
                self._pack(left, self._kernel.rows, (op.matrix.rows, deep), rows, part.dtype)
                deep += rows.shape[1]
            place = out[at - first :].ctypes.data
            size = end - at, op.matrix.columns
            fine &= self._kernel.product_wide(
                left.ctypes.data, right.ctypes.data, op.matrix.rows, place, dtype, out.shape[1], size
            )
        return fine

    def _write_below(self, op: Mix, out: Array, dtype: DType, first: int, last: int) -> bool:
        left = self._packed_matrix(op.matrix, self._kernel.rows, first, last)
        fine = True
        held: list[Array] = []
        for at, end in _strips(0, out.shape[1]):
            inside = at % _READ
            if not inside:
                held = [self._columns(part, at, f"part {number} of some") for number, part in enumerate(op.parts)]
            right = self._panels("strip", end - at, op.matrix.rows, self._kernel.wide_columns)
            deep = 0
            for part, stored in zip(op.parts, held, strict=True):
                columns = stored[:, inside : inside + end - at].T
                self._pack(right, self._kernel.wide_columns, (op.matrix.rows, deep), columns, part.dtype)
                deep += columns.shape[1]
            place = out[:, at:].ctypes.data
            size = last - first, end - at
            fine &= self._kernel.product_wide(
                left.ctypes.data, right.ctypes.data, op.matrix.rows, place, dtype, out.shape[1], size
            )
        return fine

    def _columns(self, tensor: StoredTensor, first: int, place: str) -> Array:
        """Return `_READ` columns of a matrix as they are stored, or those that there are, in this worker's buffer."""
        shape = tensor.shape[0], min(_READ, tensor.shape[1] - first)
        columns = self._buffer(place, shape, kernels.STORAGE[tensor.dtype])
        read_columns(columns, tensor, first, self._sources)
        return columns

    def _packed_matrix(self, matrix: SmallMatrix, width: int, first: int, last: int) -> Array:
        """Return some columns of a small matrix in panels, as deep as it is high."""
        packed = self._panels("matrix", last - first, matrix.rows, width)
        self._pack(packed, width, (matrix.rows, 0), matrix.values[:, first:last].T, DType.F64)
        return packed

    def _panels(self, place: str, length: int, depth: int, width: int) -> Array:
        return self._buffer(place, (-(-length // width) * width * depth,), _DOUBLE)

    def _pack(self, packed: Array, width: int, place: tuple[int, int], factor: Array, dtype: DType) -> None:
        """Lay out `factor`, [length, depth], at its place in the panels."""
        along, down = (stride // factor.itemsize for stride in factor.strides)
        size = len(factor), factor.shape[1]
        self._kernel.pack_wide(packed.ctypes.data, width, place, factor.ctypes.data, dtype, size, (along, down))


def _strips(first: int, last: int) -> Iterator[tuple[int, int]]:
    return ((at, min(at + _STRIP, last)) for at in range(first, last, _STRIP))
