"""What merged numbers were stored as again: codes within half a step of W + ΔW, and scales that had a reason to change.

A code is right where no other is nearer, by the second formula and with the scale that was written. A scale is right if
it is the base's, or larger and no larger than it must be: then the largest code of its tile is the largest there is,
or, where scales are powers of two, more than half of it. A zero point is the base's, or its tile begins at the least
code.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from msgspec.structs import replace

from lora_tool.core.tensors import DType, StoredTensor, TensorTable
from lora_tool.formats.quantised.encodings import BnbInt8, OffsetIntegers, PackedIntegers, Tiled, dequantised
from lora_tool.formats.quantised.grids import Grid, Requantisable, grid_of, limits, scales_of, type_of_codes, zeros_of
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Computed, row_ops
from lora_tool.plans.core.requantise import QuantisedPart, Requantise, stored_parts
from lora_tool.verification.bounds import Bound
from lora_tool.verification.dequantised import floats_of, from_stream, small_floats
from lora_tool.verification.elements import FLOATS, Array, Files
from lora_tool.verification.pieces import PRODUCT_WEIGHTS, Compared, Rows, Tally

_ROUNDED = 2.0**-13
"""What rounding to a code may be off by, relative to half a step of codes, which is 2^16 half units of float32 or more."""
_ROUNDED_UP = 2.0**-7
"""By how much rounding up to 16 bits makes a number larger, relative to it."""
_SAMPLED, _SAMPLED_WEIGHTS = 8, 1 << 18
"""Rows of scales that are looked at in a sample, and about how many weights they are for."""


def coded_parts(op: Requantise[Computed], stored: StoredTensor, tensors: TensorTable) -> tuple[Compared, ...]:
    """Return what is compared of the `stored` codes or scales; nothing where a part of the weight is not there as planned."""
    written = _written_as(op, tensors)
    return () if written is None else tuple(_requantised_parts(stored.name, op, written))


def _written_as(op: Requantise[Computed], tensors: TensorTable) -> Requantisable | None:
    """Return the codes and scales that were written; None where one is not there as it was planned."""
    planned = stored_parts(op.encoding)
    found = {part: tensors.get(tensor.name) for part, tensor in planned.items()}
    there = {part: now for part, now in found.items() if now is not None and now.spec == planned[part].spec}
    if there.keys() != planned.keys():
        return None
    codes, scales = there[QuantisedPart.CODES], there[QuantisedPart.SCALES]
    match op.encoding:
        case BnbInt8():
            return replace(op.encoding, codes=codes, largest=scales)
        case Tiled():
            return replace(op.encoding, codes=codes, scales=scales)
        case OffsetIntegers():
            return replace(op.encoding, codes=codes, scales=scales, zeros=there[QuantisedPart.ZEROS])
        case PackedIntegers():
            return replace(op.encoding, codes=codes, scales=scales, zeros=there.get(QuantisedPart.ZEROS))


def _requantised_parts(name: str, op: Requantise[Computed], written: Requantisable) -> Iterator[Compared]:
    """Yield what is compared of a requantised weight: scales, zero points, or the numbers that its codes stand for."""
    if op.part is not QuantisedPart.CODES:
        yield Compared(name=name, op=op, stored=stored_parts(written)[op.part], written=written)
        return
    numbers, at = dequantised(written), 0
    for made in row_ops(op):
        rows = np.prod(made.shape[:-1], dtype=int)
        stored = rows_of(numbers, at, int(rows))
        yield Compared(name=name, op=made, stored=stored, begin=at * grid_of(written).width, written=written)
        at += int(rows)


def half_steps(part: Compared, rows: Rows, files: Files) -> Array:
    """Return half the distance between neighbouring codes at each of these rows' codes, as numbers, [rows, columns]."""
    written = part.written
    if not isinstance(written, Requantisable):
        raise TypeError(f"`{part.name}` holds no codes with kept scales")
    grid = grid_of(written)
    above = part.begin // grid.width
    own = [(first + above, last + above) for first, last in rows]
    raw = _codes(written, own, files)
    of_rows = np.array([grid.scales_at(row) for first, last in own for row in range(first, last)])
    low, high = int(of_rows.min()), int(of_rows.max()) + 1
    scales = np.abs(_scales(scales_of(written), grid, (low, high), files))
    scales = (scales / (127 if isinstance(written, BnbInt8) else 1)).astype(np.float32)
    steps = np.take(_half_steps_of(type_of_codes(written)), raw)
    steps *= np.repeat(scales, grid.tile[1], axis=1)[:, : grid.width][of_rows - low]
    return steps


@cache
def _half_steps_of(dtype: DType) -> Array:
    """Return half the distance of each code's neighbours, a power of two, as float32."""
    every = np.arange(256)
    powers = np.maximum((every >> 3) & 15, 1) - 11 if dtype is DType.F8_E4M3 else np.full_like(every, -1)
    return np.asarray(np.ldexp(1.0, powers), np.float32)


def step_bound(bound: Bound) -> Bound:
    """Return the bound in half steps of what was computed within the `bound` in half units of float32.

    These are 2^-24 of a value at most, whatever its code; the code's own arithmetic is in float32 as well.
    """
    return replace(bound, of_result=1 + _ROUNDED, of_value=bound.of_result * FLOATS[DType.F32].roundoff)


def scale_tally(part: Compared, first: int, last: int, files: Files) -> Tally:
    """Return what was seen of these rows of scales, or of their zero points."""
    written, op = part.written, part.op
    if not isinstance(written, Requantisable) or not isinstance(op, Requantise):
        raise TypeError(f"`{part.name}` holds no kept scales")
    grid, of, zeros = grid_of(written), (first, last), _zeros(written, (first, last), files)
    if op.part is QuantisedPart.ZEROS:
        now, before = zeros, _zeros(op.encoding, of, files)
        differ = now != before
    else:
        now, before = (_scales(tensor, grid, of, files) for tensor in (part.stored, scales_of(op.encoding)))
        differ = ~((now == before) | (np.isnan(now) & np.isnan(before)))
    tally = Tally(compared=now.size, moved=bool(differ.any()))
    if tally.moved:
        if zeros_of(written) is None:
            is_full = _are_full(written, grid, of, files)
        else:
            is_full = _are_spanned(written, grid, of, files, zeros, whole=op.part is QuantisedPart.SCALES)
        wrong = np.flatnonzero(differ & ~is_full)  # the codes tell whether they stand for the values
        tally.outside = tally.wrong = len(wrong)
        tally.first = first * grid.across + int(wrong[0]) if len(wrong) else None
    return tally


def scale_rows(part: Compared, *, all_of_them: bool) -> list[Rows]:
    """Return rows of scales: all, or some from everywhere."""
    if not isinstance(part.op, Requantise):
        raise TypeError(f"`{part.name}` holds no scales")
    grid = grid_of(part.op.encoding)
    if all_of_them:
        return [[some] for some in grid.stretches(0, grid.down, PRODUCT_WEIGHTS)]
    height = grid.rows_of(0, 1)[1]
    count = max(1, min(_SAMPLED, _SAMPLED_WEIGHTS // (height * grid.width)))
    return [[(at, at + 1)] for at in sorted({grid.down * (2 * place + 1) // (2 * count) for place in range(count)})]


def _scales(tensor: StoredTensor, grid: Grid, of: tuple[int, int], files: Files) -> Array:
    found = floats_of(tensor, of[0] * grid.across, of[1] * grid.across, files.read)
    return found.reshape(-1, grid.across)


def _are_full(written: Requantisable, grid: Grid, of: tuple[int, int], files: Files) -> Array:
    """Return of each tile of these rows of scales whether it has a code as large as codes get."""
    most = limits(written)[1] / (2 if scales_of(written).dtype in (DType.U8, DType.F8_E8M0) else 1)
    first, last = grid.rows_of(*of)
    raw = _codes(written, [(first, last)], files)
    if type_of_codes(written) is DType.F8_E4M3:  # without their signs codes have the order of what they stand for
        largest = small_floats(_of_tiles(np.maximum, raw & 0x7F, grid, of), exponent=4, mantissa=3)
        return np.asarray(largest >= most)
    low, high = (_of_tiles(function, raw.view(np.int8), grid, of) for function in (np.minimum, np.maximum))
    return np.asarray((low <= -most) | (high >= most))  # of int8's -128 a scale that was rounded up makes -127


def _of_tiles(function: np.ufunc, codes: Array, grid: Grid, of: tuple[int, int]) -> Array:
    """Return the least or largest code of each tile of these rows of scales."""
    edges = np.arange(0, grid.width, grid.tile[1])
    first, last = grid.rows_of(*of)
    parts = (codes[rows] for rows, _ in grid.parts(first, last, of[0]))
    lines = [part if grid.tile[0] == 1 else function.reduce(part, axis=0, keepdims=True) for part in parts]
    return np.asarray(function.reduceat(np.concatenate(lines), edges, axis=1))


def _are_spanned(
    written: Requantisable, grid: Grid, of: tuple[int, int], files: Files, zeros: Array, *, whole: bool
) -> Array:
    """Return of each tile with a zero point whether its codes, or that zero, begin at the least code there is: the zero
    was chosen for them; of a `whole` tile whether they end at the largest, too, but for what rounding the scale up takes.
    """
    least, most = limits(written)
    first, last = grid.rows_of(*of)
    codes = _codes(written, [(first, last)], files).view(np.int8)
    low, high = (function(_of_tiles(function, codes, grid, of), zeros) for function in (np.minimum, np.maximum))
    begins = low <= least + 1
    return begins & (high - low >= (most - least) * (1 - _ROUNDED_UP) - 1) if whole else begins


def _zeros(encoding: Requantisable, of: tuple[int, int], files: Files) -> Array:
    """Return the zero points of these rows of scales; without any, none."""
    tensor, across = zeros_of(encoding), grid_of(encoding).across
    if tensor is None:
        return np.zeros((of[1] - of[0], 0))
    rows, columns = np.arange(*of)[:, None], np.arange(across)[None, :]
    if tensor.dtype is not DType.I8:
        return from_stream(tensor, columns, rows, across, 8, files.read)
    raw = files.read(tensor, of[0] * across, (of[1] - of[0]) * across)
    return raw.view(np.int8).reshape(-1, across).astype(np.float64)


def _codes(written: Requantisable, rows: Rows, files: Files) -> Array:
    """Return ranges of rows of codes as bytes, one after the other; what is stored plus 128 in two's complement."""
    width = written.spec.shape[-1]
    row = 4 * written.codes.shape[-1] if isinstance(written, PackedIntegers) else width
    raw = files.ranges(written.codes, rows, row).reshape(-1, row)
    return np.asarray(raw + np.uint8(128))[:, :width] if isinstance(written, PackedIntegers) else raw
