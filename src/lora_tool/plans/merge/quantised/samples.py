"""Rows of a step's output, by the formula that defines it, so that a plan can estimate its rounding loss.

Where rows share one scale, an outlier in a row that no sample has raises the scale of all, and codes of eight bits keep
less of ΔW than the sample would say. So extremes are computed too, of the rows that may have one: those whose largest W,
with the most that ΔW can be there, reaches the largest W of a row without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.arrays import F32, STORED, Array
from lora_tool.formats.quantised.grids import Requantisable, grid_of, type_of_codes
from lora_tool.formats.quantised.requantising import (
    Rounding,
    Scales,
    codes_of_rows,
    numbers_of,
    stored_scales,
    stored_zeros,
)
from lora_tool.formats.stored import read_part
from lora_tool.plans.core.operation import LoraTerm, rows_of
from lora_tool.plans.core.ops import Computed, DoraDelta, LoraDelta, RowOp, row_ops
from lora_tool.plans.core.requantise import Requantise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_tool.plans.core.operation import Values


SAMPLED_ROWS, PLACES = 8, 2
"""Rows that are sampled of a weight at each place, and at how many places."""


def made_rows(made: Computed, first: int, rows: int) -> Values:
    """Return these rows of an operation's output, float64, [rows, columns]. Raises as `read_part`."""
    return np.concatenate([part.reference(numbers) for part in _cut(made, first, rows)])


def numbers(tensor: StoredTensor) -> Values:
    """Return a tensor's values, float64; of a quantised one what its codes stand for."""
    data = np.frombuffer(read_part(tensor, 0, tensor.nbytes), STORED[tensor.dtype])
    return data.astype(np.float64).reshape(tensor.shape)


def raw(tensor: StoredTensor, start: int, nbytes: int) -> NDArray[Any]:
    """Return bytes of a tensor."""
    return np.frombuffer(read_part(tensor, start, nbytes), np.uint8)


def _cut(made: Computed, first: int, rows: int) -> Iterator[RowOp]:
    """Yield the operations that make these rows, from only those rows of the factors where they can be cut."""
    at = 0
    for op in row_ops(made):
        height = math.prod(op.shape[:-1])
        begin, end = max(first - at, 0), min(first + rows - at, height)
        for part in op.cut(begin, end - begin) if begin < end else ():
            match part:
                case LoraDelta(transposed=False):
                    yield replace(part, terms=tuple(_narrow(term, end - begin) for term in part.terms))
                case DoraDelta(transposed=False):
                    yield replace(part, term=_narrow(part.term, end - begin))
                case _:
                    yield part
        at += height


def _narrow(term: LoraTerm, rows: int) -> LoraTerm:
    return replace(term, b=rows_of(term.b, term.first, rows), first=0)


_TOGETHER = 1 << 20
"""Weights that are computed together."""


def is_tall(encoding: Requantisable) -> bool:
    """Return whether an outlier elsewhere makes the codes of a row coarser: not those of floats, whose steps are relative."""
    return grid_of(encoding).tile[0] > 1 and type_of_codes(encoding) is DType.I8


def extremes_of(op: Requantise[Computed], at: int, rounding: Rounding) -> tuple[F32, F32]:
    """Return the least and the largest value of each tile that has the row `at` of scales, [1, across].

    Raises as `read_part`.
    """
    found = []
    for first, last in _rows(op, at):
        values = made_rows(op.made, first, last - first).astype(np.float32)
        found.append(rounding.extremes(op.encoding, values, first, (at, at + 1)))
    lows, highs = zip(*found, strict=True)
    return np.asarray(np.minimum.reduce(lows)), np.asarray(np.maximum.reduce(highs))


def _rows(op: Requantise[Computed], at: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows among which those with the extremes are."""
    grid = grid_of(op.encoding)
    first, last = grid.rows_of(at, at + 1)
    chosen = np.arange(first, last)
    if grid.across == 1 and (most := _most_change(op.made)) is not None:
        low, high = _ends(op.encoding, at)
        change = most[first:last]
        inside = (high + change < (high - change).max()) & (low - change > (low + change).min())
        chosen = chosen[~inside]  # all where one is not a number
    step = max(1, _TOGETHER // grid.width)
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
        for begin in range(int(run[0]), int(run[-1]) + 1, step):
            yield begin, min(begin + step, int(run[-1]) + 1)


def _ends(encoding: Requantisable, at: int) -> tuple[Array, Array]:
    """Return the least and the largest number in the base of each row that has the row `at` of scales."""
    grid = grid_of(encoding)
    scales = Scales(stored_scales(encoding, at, at + 1, raw), stored_zeros(encoding, at, at + 1, raw))
    first, last = grid.rows_of(at, at + 1)
    step, found = max(1, _TOGETHER // grid.width), []
    for begin in range(first, last, step):
        codes = codes_of_rows(encoding, begin, min(begin + step, last), raw)
        found.append(numbers_of(encoding, np.stack([codes.min(1), codes.max(1)], 1), scales, begin, at))
    both = np.concatenate(found)
    return both.min(1), both.max(1)


def _most_change(made: Computed) -> Array | None:
    """Return for each row how large a change of its values may be: no product of two vectors is larger than that of their
    lengths. None where it is not a sum of products.
    """
    parts = [_most_of(op) for op in row_ops(made)]
    return None if any(part is None for part in parts) else np.concatenate([part for part in parts if part is not None])


def _most_of(op: RowOp) -> Array | None:
    if not isinstance(op, LoraDelta) or op.transposed or op.init or any(term.experts > 1 for term in op.terms):
        return None
    return np.asarray(sum(_length(term, op.shape[0]) for term in op.terms) * (1 + 2**-20))


def _length(term: LoraTerm, rows: int) -> Array:
    left, right = (np.linalg.norm(numbers(factor), axis=axis) for factor, axis in ((term.b, 1), (term.a, 0)))
    return np.asarray(abs(term.scaling) * left[term.first : term.first + rows] * right.max(initial=0))
