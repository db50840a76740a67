"""Following the rows of tensors through transformers' conversions, without their values.

What loading does to weights is concatenate, stack, split and reorder rows (the last dimension stays whole). So each
tensor is replaced by one of its shape with a last dimension of 1, whose elements are numbers of rows; what comes out of
a conversion says where every row came from. Exact, and as large as the number of rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import numpy as np
import torch

from lora_tool.models.mapping.model import RowSlice, ShapeOnDisk, row_count


def numbered(shapes: Mapping[str, ShapeOnDisk]) -> dict[str, torch.Tensor]:
    """Return for each name a tensor of row numbers, [..., 1], or [n] for a vector; numbers do not repeat."""
    tables = {}
    first = 0
    for name, shape in shapes.items():
        count = row_count(shape)
        kept = shape if len(shape) <= 1 else (*shape[:-1], 1)
        tables[name] = torch.arange(first, first + count).reshape(kept)
        first += count + 1  # a gap, so that no two tensors' rows look like neighbours
    return tables


def pieces_of(table: torch.Tensor, shapes: Mapping[str, ShapeOnDisk]) -> tuple[RowSlice, ...]:
    """Return which rows of the numbered tensors `shapes` the rows of `table` are, neighbours joined."""
    numbers = table.reshape(-1).numpy()  # thousands of small tables: numpy's calls cost a tenth of torch's
    if not len(numbers):
        return ()
    firsts, names, first = [], [], 0
    for name, shape in shapes.items():
        firsts.append(first)
        names.append(name)
        first += row_count(shape) + 1
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    heads = numbers[starts[:-1]].tolist()
    sources = [bisect_right(firsts, head) - 1 for head in heads]
    return tuple(
        RowSlice(name=names[source], start=head - firsts[source], rows=end - begin)
        for head, source, begin, end in zip(heads, sources, starts[:-1], starts[1:], strict=True)
    )
