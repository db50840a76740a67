"""An operation's values as numbers, a few rows at a time, for writers that store them as codes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.execution.backends.choosing import backend_for
from lora_tool.execution.backends.native_backend import NativeBackend
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.kernels import STORAGE, bytes_of
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.quantised.grids import Requantisable
from lora_tool.formats.quantised.requantising import StoredAgain
from lora_tool.plans.core.ops import Computed, Precision, RowOp, row_ops
from lora_tool.plans.core.requantise import Requantise


class Numbers:
    """One worker's, with the arithmetic of a precision and its buffers. Not shared between threads."""

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        self._sources = sources
        self._precision = precision
        self.stopped = stopped
        self.bytes_of = sources.bytes_of
        self._backends: dict[object, NumpyBackend] = {}

    def rows(self, name: str, op: Requantise[Computed], first: int, last: int, dtype: DType) -> Array:
        """Return rows of the weight to quantise, rounded to `dtype`, [rows, columns]: valid until the next.

        Raises as `Backend.run` does; `name` is the output's.
        """
        made, at = [], 0
        for each in row_ops(op):
            height = math.prod(each.shape[:-1])
            begin, end = max(first - at, 0), min(last - at, height)
            if begin < end:
                made.append(self._backend(each).numbers(_rows_of(name, each, begin, end, dtype)))
                if end - begin < last - first:
                    made[-1] = made[-1].copy()
            at += height
        whole = made[0] if len(made) == 1 else np.concatenate(made)
        return whole.reshape(last - first, -1)

    def stored_again(
        self, name: str, op: Requantise[Computed], first: int, last: int, encoding: Requantisable, kept: int
    ) -> StoredAgain | None:
        """Return rows of the weight as codes; see `NativeBackend.stored_again`. None where several operations make them."""
        found = self._by_the_kernel(op, first, last)
        if found is None:
            return None
        backend, each, top = found
        return backend.stored_again(_rows_of(name, each, first - top, last - top, DType.F32), encoding, kept)

    def passed_again(
        self,
        name: str,
        op: Requantise[Computed],
        first: int,
        last: int,
        encoding: Requantisable,
        kept: int,
        out: int,
        offset: int,
    ) -> StoredAgain | None:
        """Write rows of the weight as codes to the descriptor `out` at `offset`; see `NativeBackend.passed_again`."""
        found = self._by_the_kernel(op, first, last)
        if found is None:
            return None
        backend, each, top = found
        rows = _rows_of(name, each, first - top, last - top, DType.I8, offset)
        return backend.passed_again(rows, encoding, kept, out)

    def _by_the_kernel(
        self, op: Requantise[Computed], first: int, last: int
    ) -> tuple[NativeBackend, RowOp, int] | None:
        """Return the compiled arithmetic of the operation that makes all of these rows, and where its own begin."""
        top = 0
        for each in row_ops(op):
            bottom = top + math.prod(each.shape[:-1])
            if top <= first and last <= bottom:
                backend = self._backend(each)
                return (backend, each, top) if isinstance(backend, NativeBackend) else None
            top = bottom
        return None

    def write(self, op: Requantise[Computed], codes: Array, out: int, offset: int) -> None:
        """Write codes of what `op` makes to the descriptor `out` at `offset`, as its arithmetic writes numbers."""
        self._backend(row_ops(op)[0]).write(codes, out, offset)

    def stored(self, tensor: StoredTensor, first: int, last: int) -> Array:
        """Return elements `first` to `last` of a tensor, flat; of a quantised one the numbers."""
        values = np.empty(last - first, STORAGE[tensor.dtype])
        self._sources.read_into(tensor, first * values.itemsize, bytes_of(values))
        return values

    def _backend(self, op: RowOp) -> NumpyBackend:
        chosen = backend_for(self._precision, op)
        if not issubclass(chosen, NumpyBackend):
            raise AssertionError("planned with an arithmetic that numpy does not compute")  # noqa: TRY004 - ours
        if chosen not in self._backends:
            self._backends[chosen] = chosen(self._sources, self._precision, self.stopped)
        return self._backends[chosen]


def _rows_of(name: str, op: RowOp, first: int, last: int, dtype: DType, offset: int = 0) -> ComputeUnit:
    """Return the unit of rows of an operation's output; they begin at byte `offset` of the file."""
    out = TensorSpec(name=name, dtype=dtype, shape=op.shape)
    unit = ComputeUnit(out=out, op=op, is_new=True, first=first, last=last, at=0)
    return replace(unit, at=offset - unit.begin)
