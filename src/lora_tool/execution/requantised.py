"""Writing what is requantised: the numbers of whole tiles are computed, their scales settled, and codes or scales written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from lora_tool.execution.backends.choosing import backend_for
from lora_tool.execution.backends.numpy_backend import NumpyBackend, bytes_of, retention
from lora_tool.execution.kernels import CACHE_BLOCK, STORAGE
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.native.requantising import rounding
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit, RequantiseUnit
from lora_tool.float_mode import ieee_arithmetic
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.grids import Grid, grid_of
from lora_tool.formats.quantised.requantising import numbers_of, raised, stored_scales
from lora_tool.plan.core.delta_retention import DeltaRetention
from lora_tool.plan.core.ops import Precision, RowOp, row_ops
from lora_tool.plan.core.requantise import QuantisedPart
from lora_tool.tensors import DType, TensorSpec

_BLOCK_WEIGHTS = 1 << 19
"""Weights that are computed together, where a row of tiles has no more."""
_LARGEST = 1 << 22
"""Weights of a row of tiles that are in memory at once; of a larger one they are computed for its scales, and again."""


class Requantiser:
    """One worker's, with the arithmetic of a precision and its buffers. Not shared between threads."""

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
        retained = None
        stretches = grid_of(unit.op.encoding).stretches(unit.first, unit.last, _BLOCK_WEIGHTS)
        with ieee_arithmetic(), np.errstate(all="ignore"):
            for first, last in stretches:
                if self._stopped():
                    break
                sampled = unit.op.part is QuantisedPart.CODES and first == unit.first
                found = self._tiles(unit, (first, last), out, sampled=sampled)
                retained = found if sampled else retained
        return retained

    def _tiles(self, unit: RequantiseUnit, of: tuple[int, int], out: int, *, sampled: bool) -> DeltaRetention | None:
        """Write what belongs to these rows of scales."""
        encoding, retained = unit.op.encoding, None
        grid = grid_of(encoding)
        top, bottom = grid.rows_of(*of)
        strips = list(_strips(grid, top, bottom))
        values = self._numbers(unit, *strips[0])
        low, high = self._rounding.extremes(encoding, values, top, of)
        for first, last in strips[1:]:
            values = self._numbers(unit, first, last)
            less, more = self._rounding.extremes(encoding, values, first, of)
            low, high = np.minimum(low, less), np.maximum(high, more)
        scales = raised(encoding, stored_scales(encoding, *of, self._sources.bytes_of), low, high)
        begin, _ = unit.place(*of)
        if unit.op.part is QuantisedPart.SCALES:
            write_exactly(out, bytes_of(np.ascontiguousarray(scales)), begin)
            return None
        if unit.scales_at is not None:
            write_exactly(out, bytes_of(np.ascontiguousarray(scales)), unit.place_of_scales(*of)[0])
        for first, last in strips:
            values = values if len(strips) == 1 else self._numbers(unit, first, last)
            some = min(len(values), max(1, CACHE_BLOCK // grid.width)) if sampled and first == top else 0
            meant = values[:some].copy()
            made = self._rounding.codes(encoding, values, scales, first, of[0])
            write_exactly(out, bytes_of(made), begin + (first - top) * grid.width)
            if some:
                now = numbers_of(encoding, made[:some], scales, first, of[0])
                retained = retention(self._base(unit, first, some), meant.reshape(-1), now.reshape(-1))
        return retained

    def _numbers(self, unit: RequantiseUnit, first: int, last: int) -> Array:
        """Return rows of what is stored, float32, [rows, columns]: valid until the next."""
        made, at = [], 0
        for op in row_ops(unit.op):
            height = math.prod(op.shape[:-1])
            begin, end = max(first - at, 0), min(last - at, height)
            if begin < end:
                spec = TensorSpec(name=unit.out.name, dtype=DType.F32, shape=op.shape)
                rows = ComputeUnit(out=spec, op=op, is_new=True, first=begin, last=end, at=0)
                made.append(self._backend(op).numbers(rows))
                if end - begin < last - first:
                    made[-1] = made[-1].copy()
            at += height
        whole = made[0] if len(made) == 1 else np.concatenate(made)
        return whole.reshape(last - first, -1)

    def _base(self, unit: RequantiseUnit, first: int, rows: int) -> Array:
        """Return rows of the base's weight, flat."""
        spec = unit.op.encoding.spec
        values = np.empty(rows * spec.shape[-1], STORAGE[spec.dtype])
        self._sources.read_into(dequantised(unit.op.encoding), first * values.nbytes // rows, bytes_of(values))
        return values

    def _backend(self, op: RowOp) -> NumpyBackend:
        chosen = backend_for(self._precision, op)
        if not issubclass(chosen, NumpyBackend):
            raise AssertionError("planned with an arithmetic that numpy does not compute")  # noqa: TRY004 - ours
        if chosen not in self._backends:
            self._backends[chosen] = chosen(self._sources, self._precision, self._stopped)
        return self._backends[chosen]


def _strips(grid: Grid, top: int, bottom: int) -> Iterator[tuple[int, int]]:
    """Yield the rows together, or, where they have one scale and are many, some at a time."""
    step = bottom - top if (bottom - top) * grid.width <= _LARGEST else max(1, _BLOCK_WEIGHTS // grid.width)
    for first in range(top, bottom, step):
        yield first, min(first + step, bottom)
