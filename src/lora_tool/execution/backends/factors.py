"""Factors that are made of factors, in numpy: in float64, before they are rounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lora_tool.core.tensors import StoredTensor
from lora_tool.execution.kernels import AnyArray as Array
from lora_tool.formats.open_files import Room
from lora_tool.plans.core.factor_ops import Beside, Mix

_WIDE = np.dtype(np.float64)
_STRIP, _TALL = 1 << 9, 1 << 9
"""Columns of A's, and rows of B's, that are widened at a time, to bound the memory of a product."""


class NumpyFactors:
    """Rows of the factors, in the worker's `room`; `rows` gives those of a tensor, see `NumpyBackend`."""

    def __init__(self, rows: Callable[..., Array], room: Room) -> None:
        self._rows = rows
        self._room = room
        self._parts_kept: tuple[tuple[StoredTensor, ...], tuple[Array, ...]] | None = None

    def beside(self, op: Beside, first: int, last: int) -> Array:
        """Return the scaled columns, flat, in float64."""
        made = self._room.of("made", (last - first, op.shape[1]), _WIDE)
        parts = sum(part.count for part in op.parts)
        made[:, : op.leading] = made[:, op.leading + parts :] = 0
        for part, place in zip(op.parts, op.places, strict=True):
            columns = made[:, place]
            if part.count:
                columns[...] = part.of(self._rows(part.tensor, first, last))
            if part.scale != 1:
                np.multiply(columns, part.scale, out=columns)
        return made.reshape(-1)

    def mixed(self, op: Mix, first: int, last: int) -> Array:
        """Return the product with the small matrix, flat, in float64."""
        made = self._room.of("made", (last - first, op.shape[1]), _WIDE)
        if op.below:
            columns = op.matrix.values[:, first:last].T
            stacked = self._stacked(op.parts)
            for at in range(0, op.shape[1], _STRIP):
                strip = slice(at, min(at + _STRIP, op.shape[1]))
                wide = self._room.of("factors", (op.matrix.rows, strip.stop - at), _WIDE)
                np.concatenate([part[:, strip] for part in stacked], out=wide, casting="unsafe")
                np.matmul(columns, wide, out=made[:, strip])
        else:
            for at in range(first, last, _TALL):
                end = min(at + _TALL, last)
                wide = self._room.of("factors", (end - at, op.matrix.rows), _WIDE)
                rows = [self._rows(part, at, end) for part in op.parts]
                np.concatenate(rows, axis=1, out=wide, casting="unsafe")
                np.matmul(wide, op.matrix.values, out=made[at - first : end - first])
        return made.reshape(-1)

    def _stacked(self, parts: tuple[StoredTensor, ...]) -> tuple[Array, ...]:
        """Return the whole parts as they are stored, kept from one block to the next."""
        if self._parts_kept is None or self._parts_kept[0] is not parts:
            whole = (self._rows(part, 0, part.shape[0], f"part {at}") for at, part in enumerate(parts))
            self._parts_kept = (parts, tuple(whole))
        return self._parts_kept[1]
