"""The arithmetic of `--precision float32` and `float64`, in numpy: read a block of rows, change it, write it rounded."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from lora_tool.core.choices import assert_never
from lora_tool.core.machine import ieee_arithmetic
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.execution import kernels
from lora_tool.execution.backends.backend import refuse_nonfinite, refuse_overflow
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.kernels import bytes_of
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.open_files import Room
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.factor_ops import Beside, FactorOp, Mix
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import (
    BiasDelta,
    Cast,
    Copy,
    Dequantise,
    DoraDelta,
    LoraDelta,
    LowRank,
    OnSource,
    Precision,
    ReplaceRows,
    RowOp,
)

BLOCK_WEIGHTS = 1 << 19
"""Weights per product: large enough that packing the factors is cheap, small enough that the delta stays in the
last-level cache (measured best of 2^17 … 2^21)."""

_FACTOR_BLOCKS = 4
"""How many times smaller blocks of factors are: they are computed in float64, from more values."""

_LEAST_ROWS = 16
"""BLAS multiplies fewer rows with another routine, which is slower and gives other bits."""


class NumpyBackend:
    """See `Backend`."""

    whole_tensors: ClassVar[bool] = False

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        self._sources = sources
        self._precision = precision
        self._wide: np.dtype[Any] = np.dtype(np.float32)
        self._column_norms: Array = np.empty(0)
        self._stopped = stopped
        self._room = Room()
        self._stack: tuple[StoredTensor, Array] | None = None
        self._kept: tuple[StoredTensor, int, np.dtype[Any], tuple[Array, ...]] | None = None
        self._retained: DeltaRetention | None = None

    @cached_property
    def _factors(self) -> NumpyFactors:
        return NumpyFactors(self._rows, self._room)

    @staticmethod
    def one_thread() -> AbstractContextManager[object]:
        """Give the BLAS of numpy one thread."""
        from threadpoolctl import threadpool_limits  # slow to import: it scans every loaded library

        one: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
        return one

    def run(self, unit: ComputeUnit, out: int) -> DeltaRetention | None:
        """See `Backend`."""
        with self._ready_for(unit):
            self._write(unit, out)
        return self._retained

    def _write(self, unit: ComputeUnit, out: int) -> None:
        """Compute the unit and write it, some rows after the others."""
        for first, last in self._blocks(unit):
            if self._stopped():
                break
            block = self._block(unit, first, last, sampled=first == unit.first)
            self.write(block, out, unit.at + first * unit.row_bytes)

    def write(self, result: Array, out: int, offset: int) -> None:
        """Write an array, whose elements lie one after the other, to the descriptor `out` at `offset`."""
        write_exactly(out, bytes_of(result), offset)

    def numbers(self, unit: ComputeUnit) -> Array:
        """Return the unit's values, flat, in this worker's buffer, instead of writing them. Raises as `run`."""
        with self._ready_for(unit):
            return self._block(unit, unit.first, unit.last, sampled=False)

    @contextlib.contextmanager
    def _ready_for(self, unit: ComputeUnit) -> Iterator[None]:
        self._retained = None
        self._wide = np.dtype(np.float64 if self._needs_float64(unit.op) else np.float32)
        with ieee_arithmetic(), np.errstate(all="ignore"):  # NaN and infinity are refused later, by the tensor's name
            if isinstance(unit.op, DoraDelta) and unit.op.transposed:
                self._column_norms = self._norms_of_columns(unit.op, unit)
            yield

    def _needs_float64(self, op: RowOp) -> bool:
        """Whether to compute in float64: as requested, or because float32 would lose bits of a float64 source."""
        if self._precision is Precision.FLOAT64 or isinstance(op, FactorOp) or op.source.dtype is DType.F64:
            return True
        return isinstance(op, ReplaceRows) and op.rows.dtype is DType.F64

    def _norms_of_columns(self, op: DoraDelta, unit: ComputeUnit) -> Array:
        """Return ‖W + Δ‖ of every column: a pass over all rows of its own, so that memory stays a block."""
        squares = np.zeros(op.source.shape[1], np.float64)
        for first, last in self._blocks(unit):
            if self._stopped():
                break
            moved = self._moved(op, first, last).astype(np.float64, copy=False)
            squares += kernels.sums_of_squares(moved, axis=0)
        return np.asarray(np.sqrt(squares), dtype=self._wide)

    def _blocks(self, unit: ComputeUnit) -> Iterator[tuple[int, int]]:
        """Yield the unit's rows in blocks of about as many weights and about the same height."""
        rows, width = unit.last - unit.first, max(1, math.prod(unit.out.shape[1:]))
        count = max(1, math.ceil(rows / max(_LEAST_ROWS, self._block_weights(unit.op) // width)))
        edges = [unit.first + rows * number // count for number in range(count + 1)]
        return itertools.pairwise(edges)

    def _block_weights(self, op: RowOp) -> int:
        """Return how many weights a block has."""
        return BLOCK_WEIGHTS // (_FACTOR_BLOCKS if isinstance(op, FactorOp) else 1)

    def _block(self, unit: ComputeUnit, first: int, last: int, *, sampled: bool) -> Array:
        """Return rows `first` to `last` of the output, flat, in this worker's buffer.

        Where it is `sampled`, what rounding left of the change is kept.
        """
        source, change, whole = self._made(unit.op, first, last)
        dtype = unit.out.dtype
        result = self._room.of("result", source.shape, kernels.STORAGE[dtype])
        for at in range(0, result.size, kernels.CACHE_BLOCK):
            part = slice(at, at + kernels.CACHE_BLOCK)
            if change is None:
                total = self._wide_copy(source[part])
            else:
                total = change[part] if whole else np.add(self._wide_copy(source[part]), change[part], out=change[part])
            small = kernels.is_small(total)  # then every type but float16 holds it
            if not small and unit.is_new and not np.isfinite(total).all():
                refuse_nonfinite(unit)
            kernels.round_to(total, dtype, result[part])
            if (not small or dtype is DType.F16) and kernels.overflows(total, result[part]):
                refuse_overflow(unit)
            if change is not None and sampled and at == 0:
                self._retained = kernels.retention(source[part], total, result[part])
        return result

    def _made(self, op: RowOp, first: int, last: int) -> tuple[Array, Array | None, bool]:
        """Return what `_parts` does; of a computed factor its own rows, to which nothing is added."""
        match op:
            case Beside():
                return self._factors.beside(op, first, last), None, False
            case Mix():
                return self._factors.mixed(op, first, last), None, False
            case _:
                return self._parts(op, first, last)

    def _parts(self, op: OnSource, first: int, last: int) -> tuple[Array, Array | None, bool]:
        """Return the source's rows, flat, and what to add to them, or, with True, to replace them with."""
        match op:
            case Copy() | Cast() | Dequantise():
                return self._stored(op.source, first, last), None, False
            case ReplaceRows():
                return self._with_rows(op, self._stored(op.source, first, last), first, last), None, False
            case BiasDelta():
                bias = np.asarray(
                    sum(self._wide_rows(each.bias, first, last) * self._wide.type(each.scaling) for each in op.terms)
                )
                return self._stored(op.source, first, last), bias, False
            case LoraDelta():
                delta = self._delta(op, first, last)
                return self._stored(op.source, first, last), delta, False
            case DoraDelta():
                moved = self._moved(op, first, last)
                self._scale_to_magnitude(op, moved, first, last)
                return self._stored(op.source, first, last), moved.reshape(-1), True
            case _:
                return assert_never(op)

    def _with_rows(self, op: ReplaceRows, source: Array, first: int, last: int) -> Array:
        """Return rows `first` to `last` of W, flat, in the working precision, with the replaced ones in their places."""
        mixed = source.astype(self._wide).reshape(last - first, -1)
        inside = [(at, row - first) for at, row in enumerate(op.indices) if first <= row < last]
        if inside:
            rows = self._wide_rows(op.rows, 0, op.rows.shape[0])
            for at, row in inside:
                mixed[row] = rows[at]
        return mixed.reshape(-1)

    def _wide_copy(self, stored: Array) -> Array:
        """Return the elements in the working precision, in this worker's buffer."""
        wide = self._room.of("wide", stored.shape, self._wide)
        np.copyto(wide, stored, casting="unsafe")
        return wide

    def _moved(self, op: DoraDelta, first: int, last: int) -> Array:
        """Return rows `first` to `last` of W + Δ in the working precision, in this worker's buffer."""
        moved, source = self._delta(op, first, last), self._stored(op.source, first, last)
        np.add(moved, self._wide_copy(source), out=moved)
        return moved.reshape(last - first, -1)

    def _scale_to_magnitude(self, op: DoraDelta, moved: Array, first: int, last: int) -> None:
        """Replace W + Δ by m/‖W + Δ‖ · (W + Δ); the norms are of rows, of columns where W is stored [in, out]."""
        if op.transposed:
            factor = self._wide_rows(op.magnitude, 0, op.magnitude.shape[0]) / self._column_norms
            np.multiply(moved, factor, out=moved)
        else:
            factor = self._wide_rows(op.magnitude, first, last) / np.sqrt(kernels.sums_of_squares(moved, axis=1))
            np.multiply(moved, factor[:, np.newaxis], out=moved)

    def _delta(self, op: LowRank, first: int, last: int) -> Array:
        """Return the change of rows `first` to `last`, flat, in this worker's buffer."""
        delta = self._room.of("delta", (last - first, *op.source.shape[1:]), self._wide)
        self._product(op, op.terms[0], first, last, delta)
        for term in op.terms[1:]:
            more = self._room.of("more", delta.shape, self._wide)
            self._product(op, term, first, last, more)
            delta += more
        return delta.reshape(-1)

    def _product(self, op: LowRank, term: LoraTerm, first: int, last: int, out: Array) -> None:
        """Write scaling·(B·A), as W is stored, into `out`."""
        rows = self._left(op, term, first, last)
        scaling = self._wide.type(term.scaling)
        # a power of two commutes with every rounding, so it is cheaper on the factor than on the product
        if math.frexp(term.scaling)[0] == 0.5:  # noqa: PLR2004 - frexp's mantissa of a power of two
            rows = rows * scaling
            scaling = self._wide.type(1)
        if self._wide == np.float64:
            high, low = self._right(op, term)
            np.copyto(out, kernels.exact_product(kernels.slices(rows, axis=1), (high, low)))
        else:
            np.matmul(np.ascontiguousarray(rows), self._right(op, term)[0], out=out)
        if scaling != 1:
            np.multiply(out, scaling, out=out)

    def _left(self, op: LowRank, term: LoraTerm, first: int, last: int) -> Array:
        """Return rows of the left factor in the working precision."""
        # W stored [in, out] has columns of A for its rows, and its delta is Aᵀ·Bᵀ
        inner = slice(first + term.first, last + term.first)
        return self._columns_of_a(term, inner).T.astype(self._wide) if op.transposed else self._b(term, inner)

    def _right(self, op: LowRank, term: LoraTerm) -> tuple[Array, ...]:
        """Return the right factor, kept from one block to the next: whole, or in slices for `exact_product`."""
        tensor = term.b if op.transposed else term.a
        if self._kept is None or self._kept[0] is not tensor or self._kept[1:3] != (term.expert, self._wide):
            whole = (
                self._b(term, slice(0, tensor.shape[0])).T
                if op.transposed
                else self._rows_of_a(term).astype(self._wide, copy=False)
            )
            kept = kernels.slices(whole, axis=0) if self._wide == np.float64 else (whole,)
            self._kept = (tensor, term.expert, self._wide, kept)
        return self._kept[3]

    def _b(self, term: LoraTerm, rows: slice) -> Array:
        return np.ascontiguousarray(self._rows_of_b(term, rows)).astype(self._wide, copy=False)

    def _wide_rows(self, tensor: StoredTensor, first: int, last: int) -> Array:
        return self._rows(tensor, first, last).astype(self._wide, copy=False)

    def _stored(self, tensor: StoredTensor, first: int, last: int) -> Array:
        """Return the rows as they are stored, flat, in this worker's buffer."""
        return self._rows(tensor, first, last, "stored").reshape(-1)

    def _rows(self, tensor: StoredTensor, first: int, last: int, place: str = "") -> Array:
        """Return rows `first` to `last` of the tensor in its storage type, [last - first, ...].

        The array is new, or the worker's buffer `place` where one is named: the system clears the pages of a new one.
        """
        shape, storage = (last - first, *tensor.shape[1:]), kernels.STORAGE[tensor.dtype]
        out = self._room.of(place, shape, storage) if place else np.empty(shape, storage)
        self._sources.read_into(tensor, first * math.prod(tensor.shape[1:]) * storage.itemsize, bytes_of(out))
        return out

    def _rows_of_a(self, term: LoraTerm, place: str = "") -> Array:
        """Return the rows of A that are the term's expert's, as they are stored; see `_rows`."""
        return self._rows(term.a, term.expert * term.rank, (term.expert + 1) * term.rank, place)

    def _columns_of_a(self, term: LoraTerm, columns: slice) -> Array:
        """Return columns of A's rows as they are stored: of an embedding's, as wide as the vocabulary, no others are read."""
        some = self._room.of("columns", (term.rank, columns.stop - columns.start), kernels.STORAGE[term.a.dtype])
        for at, row in enumerate(some, start=term.expert * term.rank):
            self._sources.read_into(term.a, (at * term.a.shape[1] + columns.start) * some.itemsize, bytes_of(row))
        return some

    def _rows_of_b(self, term: LoraTerm, rows: slice, place: str = "") -> Array:
        """Return these rows of B as they are stored, with the columns of the term's expert; see `_rows`."""
        if term.experts == 1:
            return self._rows(term.b, rows.start, rows.stop, place)
        if self._stack is None or self._stack[0] is not term.b:
            # every expert's columns are scattered over all of B, and its experts come one after the other
            self._stack = (term.b, self._rows(term.b, 0, term.b.shape[0]))
        grouped = term.layout is ExpertLayout.GROUPED_BY_EXPERT
        own = slice(term.expert * term.rank, (term.expert + 1) * term.rank)
        columns = own if grouped else slice(term.expert, None, term.experts)
        return np.asarray(self._stack[1][rows, columns])


# Factors that are made of factors, in numpy: in float64, before they are rounded.


_WIDE = np.dtype(np.float64)
_STRIP, _TALL = 1 << 9, 1 << 9
"""Columns of A's, and rows of B's, that are widened at a time, to bound the memory of a product."""


class NumpyFactors:
    """Rows of the factors, in the worker's `room`; `rows` gives those of a tensor, see `NumpyBackend`."""

    def __init__(self, rows: Callable[..., Array], room: Room) -> None:
        self._rows = rows
        self._room = room
        self._parts_kept: tuple[tuple[StoredTensor, ...], tuple[Array, ...]] | None = None

    def beside(self, op: Beside, first: int, last: int) -> Array:
        """Return the scaled columns, flat, in float64."""
        made = self._room.of("made", (last - first, op.shape[1]), _WIDE)
        parts = sum(part.count for part in op.parts)
        made[:, : op.leading] = made[:, op.leading + parts :] = 0
        for part, place in zip(op.parts, op.places, strict=True):
            columns = made[:, place]
            if part.count:
                columns[...] = part.of(self._rows(part.tensor, first, last))
            if part.scale != 1:
                np.multiply(columns, part.scale, out=columns)
        return made.reshape(-1)

    def mixed(self, op: Mix, first: int, last: int) -> Array:
        """Return the product with the small matrix, flat, in float64."""
        made = self._room.of("made", (last - first, op.shape[1]), _WIDE)
        if op.below:
            columns = op.matrix.values[:, first:last].T
            stacked = self._stacked(op.parts)
            for at in range(0, op.shape[1], _STRIP):
                strip = slice(at, min(at + _STRIP, op.shape[1]))
                wide = self._room.of("factors", (op.matrix.rows, strip.stop - at), _WIDE)
                np.concatenate([part[:, strip] for part in stacked], out=wide, casting="unsafe")
                np.matmul(columns, wide, out=made[:, strip])
        else:
            for at in range(first, last, _TALL):
                end = min(at + _TALL, last)
                wide = self._room.of("factors", (end - at, op.matrix.rows), _WIDE)
                rows = [self._rows(part, at, end) for part in op.parts]
                np.concatenate(rows, axis=1, out=wide, casting="unsafe")
                np.matmul(wide, op.matrix.values, out=made[at - first : end - first])
        return made.reshape(-1)

    def _stacked(self, parts: tuple[StoredTensor, ...]) -> tuple[Array, ...]:
        """Return the whole parts as they are stored, kept from one block to the next."""
        if self._parts_kept is None or self._parts_kept[0] is not parts:
            whole = (self._rows(part, 0, part.shape[0], f"part {at}") for at, part in enumerate(parts))
            self._parts_kept = (parts, tuple(whole))
        return self._parts_kept[1]
