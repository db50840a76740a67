"""Writing what is requantised: the numbers of whole tiles are computed, their scales settled, and codes or scales written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lora_tool.execution.backends.numpy_backend import bytes_of, retention
from lora_tool.execution.kernels import CACHE_BLOCK
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.execution.native.requantising import rounding
from lora_tool.execution.numbers import Numbers
from lora_tool.execution.output import write_exactly
from lora_tool.execution.units import RequantiseUnit
from lora_tool.float_mode import ieee_arithmetic
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.grids import Grid, grid_of
from lora_tool.formats.quantised.requantising import numbers_of, raised, stored_scales
from lora_tool.plan.core.delta_retention import DeltaRetention
from lora_tool.plan.core.requantise import QuantisedPart
from lora_tool.tensors import DType

_BLOCK_WEIGHTS = 1 << 19
"""Weights that are computed together, where a row of tiles has no more."""
_LARGEST = 1 << 22
"""Weights of a row of tiles that are in memory at once; of a larger one they are computed for its scales, and again."""


class Requantiser:
    """One worker's. Not shared between threads."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._rounding = rounding()

    def run(self, unit: RequantiseUnit, out: int) -> DeltaRetention | None:
        """Write the unit to the descriptor `out`; return what rounding left of the change, on a sample of codes.

        Raises as `Backend.run` does.
        """
        retained = None
        stretches = grid_of(unit.op.encoding).stretches(unit.first, unit.last, _BLOCK_WEIGHTS)
        with ieee_arithmetic(), np.errstate(all="ignore"):
            for first, last in stretches:
                if self._numbers.stopped():
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
        values = self._rows(unit, *strips[0])
        low, high = self._rounding.extremes(encoding, values, top, of)
        for first, last in strips[1:]:
            values = self._rows(unit, first, last)
            less, more = self._rounding.extremes(encoding, values, first, of)
            low, high = np.minimum(low, less), np.maximum(high, more)
        scales = raised(encoding, stored_scales(encoding, *of, self._numbers.bytes_of), low, high)
        begin, _ = unit.place(*of)
        if unit.op.part is QuantisedPart.SCALES:
            write_exactly(out, bytes_of(np.ascontiguousarray(scales)), begin)
            return None
        if unit.scales_at is not None:
            write_exactly(out, bytes_of(np.ascontiguousarray(scales)), unit.place_of_scales(*of)[0])
        for first, last in strips:
            values = values if len(strips) == 1 else self._rows(unit, first, last)
            some = min(len(values), max(1, CACHE_BLOCK // grid.width)) if sampled and first == top else 0
            meant = values[:some].copy()
            made = self._rounding.codes(encoding, values, scales, first, of[0])
            write_exactly(out, bytes_of(made), begin + (first - top) * grid.width)
            if some:
                now = numbers_of(encoding, made[:some], scales, first, of[0])
                width = grid.width
                before = self._numbers.stored(dequantised(encoding), first * width, (first + some) * width)
                retained = retention(before, meant.reshape(-1), now.reshape(-1))
        return retained

    def _rows(self, unit: RequantiseUnit, first: int, last: int) -> Array:
        return self._numbers.rows(unit.out.name, unit.op, first, last, DType.F32)


def _strips(grid: Grid, top: int, bottom: int) -> Iterator[tuple[int, int]]:
    """Yield the rows together, or, where they have one scale and are many, some at a time."""
    step = bottom - top if (bottom - top) * grid.width <= _LARGEST else max(1, _BLOCK_WEIGHTS // grid.width)
    for first in range(top, bottom, step):
        yield first, min(first + step, bottom)
