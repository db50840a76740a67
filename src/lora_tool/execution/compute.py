"""Computing one unit of a plan: read blocks, apply the step's operation, write the rounded result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from lora_tool.errors import ExecutionError
from lora_tool.execution import kernels
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.plan.model import BiasDelta, Cast, LoraDelta, LoraTerm, Precision, Step
from lora_tool.tensors import DType, StoredTensor

BLOCK_WEIGHTS = 1 << 19
"""Weights per block: W, its delta and the scratch together stay near the caches (measured best of 2^17 … 2^21)."""

_LEAST_ROWS = 16
"""A product of one or few rows goes through another BLAS routine, slower and of other bits."""


class Computer:
    """One worker's arithmetic, with the buffers it reuses. Not shared between threads."""

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        self._sources = sources
        self._wide = np.dtype(np.float64 if precision is Precision.FLOAT64 else np.float32)
        self._precision = precision
        self._stopped = stopped
        self._buffers: dict[str, NDArray[Any]] = {}
        self._factors: tuple[StoredTensor, NDArray[Any]] | None = None

    def run(self, unit: ComputeUnit, out: int) -> None:
        """Compute the unit and write it to the descriptor `out`. Raises `ExecutionError` on NaN or infinity."""
        out_dtype = unit.step.out.dtype
        for first, last in _blocks(unit):
            if self._stopped():
                return
            values = self._values(unit.step, first, last)
            rounded = kernels.round_to(values, out_dtype)
            if not kernels.is_finite_stored(rounded, out_dtype) and kernels.overflows(values, rounded, out_dtype):
                refuse_overflow(unit.step)
            write_exactly(out, bytes_of(rounded), unit.at + first * unit.row_bytes)

    def _values(self, step: Step, first: int, last: int) -> NDArray[Any]:
        """Return the unrounded result of the step for rows `first` to `last`."""
        op = step.op
        if isinstance(op, Cast):
            return self._load(op.source, first, last, "total")
        if isinstance(op, BiasDelta):
            total = self._load(op.source, first, last, "total")
            for term in op.terms:
                bias = self._load(term.bias, first, last, "delta")
                total += bias * self._wide.type(term.scaling)
        elif isinstance(op, LoraDelta):
            total = self._merged(op, first, last)
        else:
            raise AssertionError(f"{type(op).__name__} is not computed")
        where = kernels.first_nonfinite(total)
        if where is not None:
            refuse_nonfinite(step, where + first * (total.size // max(last - first, 1)))
        return total

    def _merged(self, op: LoraDelta, first: int, last: int) -> NDArray[Any]:
        total = self._load(op.source, first, last, "total")
        delta = self._buffer("delta", total.shape)
        if len(op.terms) == 1:
            self._add_term(op, op.terms[0], (first, last), total, delta)
            return total
        summed = np.zeros_like(total)
        for term in op.terms:
            self._add_term(op, term, (first, last), summed, delta)
        total += summed
        return total

    def _add_term(
        self, op: LoraDelta, term: LoraTerm, rows: tuple[int, int], total: NDArray[Any], delta: NDArray[Any]
    ) -> None:
        left, right = self._term_factors(op, term, *rows)
        if self._precision is Precision.FLOAT64:
            np.multiply(kernels.exact_product(left, right), term.scaling, out=delta)
            np.add(total, delta, out=total)
        else:
            kernels.add_delta(total, left, right, term.scaling, delta)

    def _term_factors(self, op: LoraDelta, term: LoraTerm, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the two factors whose product is rows `first` to `last` of B·A as W is stored."""
        if op.transposed:  # W is [in, out]: its rows are columns of A, and the product is Aᵀ·Bᵀ
            return self._whole(term.a)[:, first:last].T, self._widened(self._sources.rows(term.b, 0, term.b.shape[0]), term.b).T
        return self._widened(self._sources.rows(term.b, first, last), term.b), self._whole(term.a)

    def _whole(self, tensor: StoredTensor) -> NDArray[Any]:
        """Return all of lora_A, kept from one block to the next."""
        if self._factors is None or self._factors[0] is not tensor:
            self._factors = (tensor, self._widened(self._sources.rows(tensor, 0, tensor.shape[0]), tensor))
        return self._factors[1]

    def _widened(self, stored: NDArray[Any], tensor: StoredTensor) -> NDArray[Any]:
        if stored.dtype == self._wide and tensor.dtype is not DType.BF16:
            return stored
        return kernels.widen(stored, tensor.dtype, np.empty(stored.shape, self._wide))

    def _load(self, tensor: StoredTensor, first: int, last: int, buffer: str) -> NDArray[Any]:
        """Return the rows in the working precision, in this worker's own buffer."""
        shape = (last - first, *tensor.shape[1:]) if tensor.shape else ()
        wide = self._buffer(buffer, shape)
        stored = self._buffer("stored", shape, kernels.STORAGE[tensor.dtype])
        row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape else 0
        self._sources.read_into(tensor, first * row_bytes, memoryview(stored.reshape(-1)).cast("B"))
        return kernels.widen(stored, tensor.dtype, wide)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> NDArray[Any]:
        dtype = dtype or self._wide
        needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        held = self._buffers.get(name)
        if held is None or held.nbytes < needed:
            held = self._buffers[name] = np.empty(needed, np.uint8)
        return held[:needed].view(dtype).reshape(shape)



def _blocks(unit: ComputeUnit) -> Iterator[tuple[int, int]]:
    rows = unit.last - unit.first
    width = unit.step.out.numel // unit.step.out.shape[0] if unit.step.out.shape else 1
    count = max(1, round(rows / max(_LEAST_ROWS, BLOCK_WEIGHTS // width)))
    edges = [unit.first + rows * number // count for number in range(count + 1)]
    return zip(edges[:-1], edges[1:], strict=True)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the array's elements as bytes, without copying where they lie in order."""
    return memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B")


def write_exactly(out: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the descriptor `out` at `offset`."""
    done = 0
    while done < len(data):
        done += os.pwrite(out, data[done:], offset + done)


def refuse_nonfinite(step: Step, where: int) -> NoReturn:
    """Raise `ExecutionError`: element `where` of the step's output is NaN or infinite."""
    op = step.op
    names = [step.op.source.name]
    if isinstance(op, LoraDelta):
        names += [name for term in op.terms for name in (term.a.name, term.b.name)]
    raise ExecutionError(
        f"`{step.out.name}` would hold NaN or infinity at element {where}: it is made of {', '.join(names)}",
        hint="lora-tool validate --deep shows which of them is not finite",
    )


def refuse_overflow(step: Step) -> NoReturn:
    """Raise `ExecutionError`: a finite value does not fit into the step's output type."""
    raise ExecutionError(
        f"`{step.out.name}`: a value is too large for {step.out.dtype}",
        hint="choose a wider type: --dtype bfloat16 or --dtype float32",
    )
