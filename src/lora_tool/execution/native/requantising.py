"""Numbers as codes, by the compiled kernel: the bits that numpy gives."""

from __future__ import annotations

import numpy as np

from lora_tool.execution.native.library import Codes, Kernel, kernel
from lora_tool.execution.native.rows import KINDS
from lora_tool.formats.quantised.arrays import F32, Array
from lora_tool.formats.quantised.coded import Code
from lora_tool.formats.quantised.encodings import BnbInt8
from lora_tool.formats.quantised.grids import Grid, Requantisable, grid_of, limits
from lora_tool.formats.quantised.requantising import Rounding
from lora_tool.tensors import DType


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
        codes.kind = KINDS.index(Code.INT8 if encoding.codes.dtype is DType.I8 else Code.E4M3)
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


def rounding() -> Rounding:
    """Return the kernel's rounding, that of numpy where there is none. Raises as `kernel`."""
    found = kernel()
    return Rounding() if found is None else KernelRounding(found)
