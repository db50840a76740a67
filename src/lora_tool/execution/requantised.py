"""Writing requantised weights: compute the numbers of whole tiles, choose their scales, write codes or scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from msgspec.structs import replace

from lora_tool.core.machine import ieee_arithmetic
from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.execution.backends.choosing import backend_for
from lora_tool.execution.backends.native_backend import NativeBackend
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.kernels import STORAGE, bytes_of, retention
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit, RequantiseUnit
from lora_tool.formats.quantised.arrays import STORED
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.grids import Grid, Requantisable, grid_of, type_of_codes, zeros_of
from lora_tool.formats.quantised.requantising import (
    Scales,
    as_stored,
    bytes_of_codes,
    bytes_of_zeros,
    numbers_of,
    settled,
    stored_scales,
)
from lora_tool.native.quantised import rounding
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.ops import Precision, RowOp, row_ops
from lora_tool.plans.core.requantise import QuantisedPart

_BLOCK_WEIGHTS = 1 << 20
"""Weights that are read and written together in steps, where a row of tiles has no more."""
_SAMPLED_WEIGHTS = 1 << 12
"""Weights of a unit on which is measured what rounding left of the change."""
_LARGEST = 1 << 22
"""Weights of a row of tiles that are in memory at once; of a larger one they are computed for its scales, and again."""


class Requantiser:
    """One worker's. Not shared between threads."""

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        self._sources = sources
        self._precision = precision
        self._stopped = stopped
        self._backends: dict[object, NumpyBackend] = {}
        self._rounding = rounding()

    def run(self, unit: RequantiseUnit, out: int) -> DeltaRetention | None:
        """Write the unit to the descriptor `out`; return what rounding left of the change, on a sample of codes.

        Raises as `Backend.run` does.
        """
        retained, at = None, unit.first
        grid, is_codes = grid_of(unit.op.encoding), unit.op.part is QuantisedPart.CODES
        with ieee_arithmetic(), np.errstate(all="ignore"):
            while at < unit.last and not self._stopped():
                top, bottom = grid.rows_of(at, unit.last)
                sampled = is_codes and at == unit.first
                some = min(bottom - top, max(1, _SAMPLED_WEIGHTS // grid.width)) if sampled else 0
                done, found = self._passed(unit, at, out, some) if is_codes else (0, None)
                if not done:  # the kernel's one-pass path refused these tiles; this one raises by name
                    first, last = next(grid.stretches(at, unit.last, _BLOCK_WEIGHTS))
                    done, found = last - first, self._in_steps(unit, (first, last), out, some)
                retained = found if sampled else retained
                at += done
        return retained

    def _passed(self, unit: RequantiseUnit, first: int, out: int, some: int) -> tuple[int, DeltaRetention | None]:
        """Write rows of tiles from file to file, and their scales; return how many rows of scales, and as `run` does.

        None are written where no kernel computes them, or several operations make them.
        """
        encoding = unit.op.encoding
        top, bottom = grid_of(encoding).rows_of(first, unit.last)
        begin, _ = unit.place(QuantisedPart.CODES, first, unit.last)
        above = 0
        for op in row_ops(unit.op):
            below = above + math.prod(op.shape[:-1])
            if above <= top and bottom <= below:
                break
            above = below
        else:
            return 0, None
        backend = self._backend(op)
        rows = _rows_of(unit, op, top - above, bottom - above, DType.I8, begin)
        made = backend.passed_again(rows, encoding, some, out) if isinstance(backend, NativeBackend) else None
        if made is None:
            return 0, None
        of = first, first + len(made.scales)
        scales = Scales(as_stored(encoding, stored_scales(encoding, *of, self._sources.bytes_of), made.scales))
        self._write_scales(unit, of, scales, out)
        codes = made.codes.view(STORED[type_of_codes(encoding)])
        sample = _retention(encoding, made.before, made.meant, codes, scales, (top, first)) if some else None
        return len(made.scales), sample

    def _write_scales(self, unit: RequantiseUnit, of: tuple[int, int], scales: Scales, out: int) -> bool:
        """Write scales and zero points where they belong to the unit; return whether codes do."""
        zeros = zeros_of(unit.op.encoding)
        if QuantisedPart.SCALES in unit.written:
            write_exactly(out, bytes_of(np.ascontiguousarray(scales.stored)), unit.place(QuantisedPart.SCALES, *of)[0])
        if QuantisedPart.ZEROS in unit.written and zeros is not None and scales.zeros is not None:
            raw = bytes_of_zeros(zeros, scales.zeros)
            write_exactly(out, bytes_of(raw), unit.place(QuantisedPart.ZEROS, *of)[0])
        return QuantisedPart.CODES in unit.written

    def _in_steps(self, unit: RequantiseUnit, of: tuple[int, int], out: int, some: int) -> DeltaRetention | None:
        """Write what belongs to these rows of scales: all numbers first, then their codes; sample so many rows."""
        encoding, retained = unit.op.encoding, None
        grid = grid_of(encoding)
        top, bottom = grid.rows_of(*of)
        strips = list(_strips(grid, top, bottom))
        values = self._rows(unit, *strips[0])
        low, high = self._rounding.extremes(encoding, values, top, of)
        for first, last in strips[1:]:
            values = self._rows(unit, first, last)
            less, more = self._rounding.extremes(encoding, values, first, of)
            low, high = np.minimum(low, less), np.maximum(high, more)
        scales = settled(encoding, of, low, high, self._sources.bytes_of)
        if not self._write_scales(unit, of, scales, out):
            return None
        begin, _ = unit.place(unit.op.part, *of)
        row_bytes = unit.out.nbytes // grid.rows
        for first, last in strips:
            values = values if len(strips) == 1 else self._rows(unit, first, last)
            meant = values[:some].copy() if first == top else values[:0]
            made = self._rounding.codes(encoding, values, scales, first, of[0])
            write_exactly(out, bytes_of(bytes_of_codes(encoding, made)), begin + (first - top) * row_bytes)
            if len(meant):
                before = self._stored(dequantised(encoding), top * grid.width, top * grid.width + meant.size)
                retained = _retention(encoding, before, meant, made[: len(meant)], scales, (top, of[0]))
        return retained

    def _rows(self, unit: RequantiseUnit, first: int, last: int) -> Array:
        """Return rows of the weight to quantise as float32, [rows, columns]: valid until the next. Raises as `Backend.run`."""
        made, top = [], 0
        for op in row_ops(unit.op):
            bottom = top + math.prod(op.shape[:-1])
            begin, end = max(first, top), min(last, bottom)
            if begin < end:
                rows = self._backend(op).numbers(_rows_of(unit, op, begin - top, end - top, DType.F32))
                made.append(rows if end - begin == last - first else rows.copy())
            top = bottom
        whole = made[0] if len(made) == 1 else np.concatenate(made)
        return whole.reshape(last - first, -1)

    def _stored(self, tensor: StoredTensor, first: int, last: int) -> Array:
        """Return elements `first` to `last` of a tensor, flat; of a quantised one the numbers."""
        values = np.empty(last - first, STORAGE[tensor.dtype])
        self._sources.read_into(tensor, first * values.itemsize, bytes_of(values))
        return values

    def _backend(self, op: RowOp) -> NumpyBackend:
        chosen = backend_for(self._precision, op)
        if not issubclass(chosen, NumpyBackend):
            raise AssertionError("planned with an arithmetic that numpy does not compute")  # noqa: TRY004 - ours
        if chosen not in self._backends:
            self._backends[chosen] = chosen(self._sources, self._precision, self._stopped)
        return self._backends[chosen]


def _rows_of(of: RequantiseUnit, op: RowOp, first: int, last: int, dtype: DType, offset: int = 0) -> ComputeUnit:
    """Return the unit of rows of an operation's output; they begin at byte `offset` of the file."""
    out = TensorSpec(name=of.out.name, dtype=dtype, shape=op.shape)
    unit = ComputeUnit(out=out, op=op, is_new=True, first=first, last=last, at=0)
    return replace(unit, at=offset - unit.begin)


def _retention(
    encoding: Requantisable, before: Array, meant: Array, codes: Array, scales: Scales, at: tuple[int, int]
) -> DeltaRetention:
    """Return how much of the change these codes keep; `at` is their first row, and the first row of their scales."""
    now = numbers_of(encoding, codes, scales, *at)
    return retention(*(each.reshape(-1) for each in (before, meant, now)))


def _strips(grid: Grid, top: int, bottom: int) -> Iterator[tuple[int, int]]:
    """Yield the rows together, or, where they have one scale and are many, some at a time."""
    step = bottom - top if (bottom - top) * grid.width <= _LARGEST else max(1, _BLOCK_WEIGHTS // grid.width)
    for first in range(top, bottom, step):
        yield first, min(first + step, bottom)
