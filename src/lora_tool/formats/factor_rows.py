"""Rows of LoRA factors in the order of the weight: B's rows, and those of A transposed, however the file stores them.

Nothing is transposed in memory: a factor stored the other way comes as a view with swapped strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import as_in_the_file, fill, read_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lora_tool.formats.open_files import OpenFiles, Room

PIECE_BYTES = 2 << 20
"""Bytes of all parts that a worker reads at once: whole factors at usual ranks, large reads of bigger ones."""


def pieces(parts: Sequence[StoredTensor], files: OpenFiles, room: Room, *, below: bool) -> Iterator[list[NDArray[Any]]]:
    """Yield rows of matrices that are equally high, or, `below`, of their transposed, in order.

    They are the stored bits, in `room` until the next piece: all rows in one piece where that is little. Raises
    `SourceChanged`, `CorruptFile`.
    """
    height = parts[0].shape[1 if below else 0]
    step = max(1, PIECE_BYTES // max(1, sum(part.nbytes for part in parts) // max(1, height)))
    for first in range(0, height, step):
        count = min(step, height - first)
        yield [
            _rows(part, first, count, files, room, f"part {number}", below=below) for number, part in enumerate(parts)
        ]


def _rows(
    part: StoredTensor, first: int, count: int, files: OpenFiles, room: Room, name: str, *, below: bool
) -> NDArray[Any]:
    """Return rows of a matrix, or, `below`, of its transposed."""
    part, transposed = as_in_the_file(part)
    kind = np.dtype(f"u{part.dtype.bits // 8}")
    if transposed is below:
        rows = room.of(name, (count, part.shape[1]), kind)
        fill(rows.reshape(-1).view(np.uint8).data, part, first * rows.strides[0], files.read_exactly)
        return rows
    columns = room.of(name, (part.shape[0], count), kind)
    if count == part.shape[1]:
        fill(columns.reshape(-1).view(np.uint8).data, part, 0, files.read_exactly)
    else:
        read_columns(columns, part, first, files)
    return columns.T
