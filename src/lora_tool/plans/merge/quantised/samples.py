"""Rows of a step's output, by the formula that defines it: so that a plan can estimate its rounding loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import read_part
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Computed, DoraDelta, LoraDelta, RowOp, row_ops
from lora_tool.plans.core.terms import LoraTerm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_tool.plans.core.operation import Values

SAMPLED_ROWS, PLACES = 8, 2
"""Rows that are sampled of a weight at each place, and at how many places."""


def made_rows(made: Computed, first: int, rows: int) -> Values:
    """Return these rows of an operation's output, float64, [rows, columns]. Raises as `read_part`."""
    import numpy as np  # for few plans

    return np.concatenate([part.reference(numbers) for part in _cut(made, first, rows)])


def numbers(tensor: StoredTensor) -> Values:
    """Return a tensor's values, float64; of a quantised one what its codes stand for."""
    import numpy as np  # for few plans

    from lora_tool.formats.quantised.arrays import STORED

    data = np.frombuffer(read_part(tensor, 0, tensor.nbytes), STORED[tensor.dtype])
    return data.astype(np.float64).reshape(tensor.shape)


def raw(tensor: StoredTensor, start: int, nbytes: int) -> NDArray[Any]:
    """Return bytes of a tensor."""
    import numpy as np  # for few plans

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
