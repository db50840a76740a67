"""Codes as numbers, and numbers as codes, by the compiled kernel: the bits that numpy gives."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from lora_tool.core.tensors import DType
from lora_tool.formats.quantised.arrays import F32, STORED, Array
from lora_tool.formats.quantised.coded import Code, Scaled
from lora_tool.formats.quantised.decoding import Arithmetic
from lora_tool.formats.quantised.encodings import BnbInt8
from lora_tool.formats.quantised.grids import Grid, Requantisable, grid_of, limits, scales_of, type_of_codes
from lora_tool.formats.quantised.requantising import Rounding
from lora_tool.native.library import TYPES, Kernel, kernel
from lora_tool.native.rows import KINDS, CodedRows
from lora_tool.native.structures import Codes, Storing

_COLUMNS, _CACHED = 512, 1 << 20
"""Columns that are computed together, where so many rows of a tile have no more than that many weights."""


class KernelArithmetic(Arithmetic):
    """See `Arithmetic`. Numpy decodes the formats that the kernel lacks."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def scale(self, part: Scaled, out: F32) -> None:
        """See `Arithmetic`."""
        CodedRows(self._kernel, part, DType.F32).write(slice(None), out, DType.F32)

    def rounded(self, values: F32, dtype: DType) -> Array:
        """See `Arithmetic`."""
        if dtype in TYPES and dtype is not DType.F32:
            flat = np.ascontiguousarray(values)
            out = np.empty(values.shape, STORED[dtype])
            if self._kernel.convert(flat.ctypes.data, DType.F32, out.ctypes.data, dtype, flat.size):
                return out
        return super().rounded(values, dtype)


def arithmetic() -> Arithmetic:
    """Return the kernel's arithmetic, that of numpy where there is none. Raises as `kernel`."""
    found = kernel()
    return Arithmetic() if found is None else KernelArithmetic(found)


class KernelRounding(Rounding):
    """See `Rounding`."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def _extremes(self, grid: Grid, values: F32, first: int, scales: int, low: F32, high: F32) -> None:
        codes = _layout(grid, first, scales)
        self._kernel.extremes(codes, values.ctypes.data, values.shape, low.ctypes.data, high.ctypes.data)

    def _codes(self, encoding: Requantisable, values: F32, factors: F32, at: tuple[int, int], out: Array) -> None:
        codes = _layout(grid_of(encoding), *at)
        codes.kind = KINDS.index(Code.INT8 if type_of_codes(encoding) is DType.I8 else Code.E4M3)
        held = np.ascontiguousarray(factors)
        codes.scales = held.ctypes.data
        divided, (least, _) = not isinstance(encoding, BnbInt8), limits(encoding)
        self._kernel.quantise(codes, out.ctypes.data, values.ctypes.data, values.shape, divided=divided, least=least)


def _layout(grid: Grid, first: int, scales: int) -> Codes:
    """Return where the scales of rows from `first` are, in rows of scales from `scales`; all of one matrix, or each
    matrix has one.
    """
    tall, (top, _) = min(grid.tile[0], grid.height), grid.rows_of(scales, scales)
    return Codes(apart=grid.across, group=grid.tile[1], tall=tall, above=first - top)


class Panel(Struct, frozen=True):
    """Rows and columns of a weight whose numbers are in the cache while their scales are settled."""

    rows: int
    columns: int


def panel_of(kernel: Kernel, grid: Grid, rows: int) -> Panel | None:
    """Return what is computed together of so many rows of a weight; None where that is more than the cache holds."""
    tall, wide = grid.tile
    together = kernel.rows if tall == 1 else min(tall, rows)
    whole = math.lcm(wide, kernel.columns)
    panel = Panel(together, min(grid.width, max(whole, _COLUMNS // whole * whole)))
    return panel if wide > 1 and panel.rows * panel.columns <= _CACHED else None


def storing_of(encoding: Requantisable, panel: Panel, scales: F32, scratch: F32, meant: F32) -> Storing:
    """Return how the kernel stores a weight again, whose scales go to `scales` and first rows to `meant`, as numbers.

    It holds addresses alone.
    """
    least, most = limits(encoding)
    dtype = scales_of(encoding).dtype
    return Storing(
        raised=scales.ctypes.data,
        scratch=scratch.ctypes.data,
        meant=meant.ctypes.data,
        kept=len(meant),
        panel=panel.columns,
        least=least,
        most=most,
        scale_type=TYPES.get(dtype, len(TYPES)),
        divided=not isinstance(encoding, BnbInt8),
    )


def rounding() -> Rounding:
    """Return the kernel's rounding, that of numpy where there is none. Raises as `kernel`."""
    found = kernel()
    return Rounding() if found is None else KernelRounding(found)
