"""The arithmetic of `--precision float32`, compiled: read a block of rows, change it in place, and write it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lora_tool.execution import kernels
from lora_tool.execution.backends.numpy_backend import NumpyBackend, retention
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.native.library import TYPES, Term, kernel
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.plan.core.ops import Cast, Copy, Dequantise, DoraDelta, LoraDelta, LowRank, Precision
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.tensors import DType, StoredTensor


class NativeBackend(NumpyBackend):
    """See `Backend`. Numpy computes what the kernel cannot, and computes again what it flags, to name what is wrong."""

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        super().__init__(sources, precision, stopped)
        found = kernel()
        if found is None:
            raise AssertionError("no kernel: `backend_for` should have chosen another backend")
        self._kernel = found
        self._rights: dict[int, tuple[StoredTensor, int, Array]] = {}

    def _block(self, unit: ComputeUnit, first: int, last: int) -> Array:
        match unit.op:
            case _ if unit.out.dtype not in TYPES:
                result = None
            case Copy() | Cast() | Dequantise():
                result = self._converted(unit, first, last)
            case LoraDelta():
                result = self._changed(unit, unit.op, first, last)
            case _:
                result = None
        return super()._block(unit, first, last) if result is None else result

    def _converted(self, unit: ComputeUnit, first: int, last: int) -> Array | None:
        """Return rows of the source in the type of the output, flat; None where one is not finite."""
        dtype = unit.op.source.dtype
        stored = self._stored(unit.op.source, first, last)
        out = self._place(stored, unit.out.dtype)
        fine = self._kernel.convert(stored.ctypes.data, dtype, out.ctypes.data, unit.out.dtype, stored.size)
        return out if fine else None

    def _changed(self, unit: ComputeUnit, op: LoraDelta, first: int, last: int) -> Array | None:
        """Return rows of W + Δ in the type of the output, flat; None where one is not finite."""
        stored = self._stored(op.source, first, last)
        rows, width = last - first, op.source.shape[1]
        terms = self._terms(op, first, last)
        out = self._place(stored, unit.out.dtype)
        at = 0
        if first == unit.first:
            at = min(self._sampled_rows(width), rows)
            if not self._change_and_sample(stored[: at * width], op.source.dtype, out, unit.out.dtype, width, terms):
                return None
        if at < rows:
            later = tuple(Term(each.left + at * each.depth * 4, each.right, each.depth, each.scaling) for each in terms)
            source, target = stored[at * width :].ctypes.data, out[at * width :].ctypes.data
            size = rows - at, width
            if not self._kernel.merge(source, op.source.dtype, target, unit.out.dtype, size, later):
                return None
        return out

    def _sampled_rows(self, width: int) -> int:
        """Return how many rows hold `CACHE_BLOCK` elements, in whole tiles: packed factors begin at these."""
        return -(-kernels.CACHE_BLOCK // max(1, width * self._kernel.rows)) * self._kernel.rows

    def _change_and_sample(
        self, stored: Array, dtype: DType, out: Array, out_dtype: DType, width: int, terms: tuple[Term, ...]
    ) -> bool:
        """Write rows of W + Δ by way of float32, and keep what rounding left of Δ; False where one is not finite."""
        meant = self._buffer("meant", stored.shape, np.dtype(np.float32))
        size = stored.size // max(1, width), width
        if not self._kernel.merge(stored.ctypes.data, dtype, meant.ctypes.data, DType.F32, size, terms):
            return False
        before = stored[: kernels.CACHE_BLOCK].copy()
        fine = self._kernel.convert(meant.ctypes.data, DType.F32, out.ctypes.data, out_dtype, meant.size)
        self._retained = retention(before, meant[: before.size], out[: before.size]) if fine else None
        return fine

    def _moved(self, op: DoraDelta, first: int, last: int) -> Array:
        stored = self._stored(op.source, first, last)
        size = last - first, op.source.shape[1]
        moved = self._buffer("moved", size, self._wide)
        terms = self._terms(op, first, last)
        fine = self._kernel.merge(stored.ctypes.data, op.source.dtype, moved.ctypes.data, DType.F32, size, terms)
        return moved if fine else super()._moved(op, first, last)

    def _place(self, stored: Array, dtype: DType) -> Array:
        """Return where the elements are written: where they were read, if they are of one size."""
        storage = kernels.STORAGE[dtype]
        return (
            stored.view(storage)
            if stored.itemsize == storage.itemsize
            else self._buffer("result", stored.shape, storage)
        )

    def _terms(self, op: LowRank, first: int, last: int) -> tuple[Term, ...]:
        """Return the terms of rows `first` to `last`, their factors packed."""
        made = []
        for at, term in enumerate(op.terms):
            # W stored [in, out] has columns of A for its rows, and its delta is Aᵀ·Bᵀ
            inner = slice(first + term.first, last + term.first)
            rows = (
                self._stored_a(term, "factor")[:, inner].T if op.transposed else self._stored_b(term, inner, "factor")
            )
            left = self._packed(f"left {at}", rows, self._kernel.rows)
            right = self._right_packed(at, op, term)
            made.append(Term(left.ctypes.data, right.ctypes.data, term.rank, term.scaling))
        return tuple(made)

    def _right_packed(self, at: int, op: LowRank, term: LoraTerm) -> Array:
        """Return the right factor of the term `at`, kept from one block to the next."""
        tensor = term.b if op.transposed else term.a
        held = self._rights.get(at)
        if held is None or held[0] is not tensor or held[1] != term.expert:
            whole = slice(0, tensor.shape[0])
            columns = self._stored_b(term, whole, "factor") if op.transposed else self._stored_a(term, "factor").T
            packed = self._packed(f"right {at}", columns, self._kernel.columns)
            self._rights[at] = held = (tensor, term.expert, packed)
        return held[2]

    def _packed(self, place: str, factor: Array, width: int) -> Array:
        """Return the factor, [length, rank], in panels of `width`, in this worker's buffer."""
        length, depth = factor.shape
        packed = self._buffer(place, (-(-length // width) * width * depth,), np.dtype(np.float32))
        along, down = (stride // factor.itemsize for stride in factor.strides)
        dtype = next(dtype for dtype in TYPES if kernels.STORAGE[dtype] == factor.dtype)
        self._kernel.pack(packed.ctypes.data, width, factor.ctypes.data, dtype, (length, depth), (along, down))
        return packed
