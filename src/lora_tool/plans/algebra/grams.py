"""Gram matrices of factors side by side, and the triangle of their QR factorisation, in float64.

A factor is small: it is read whole where it has a few MB, else some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.factor_rows import pieces
from lora_tool.formats.open_files import OpenFiles, Room
from lora_tool.formats.stored_numbers import STORED, Matrix, widened

Stored = tuple[NDArray[Any], DType]
"""Stored elements, [rows, columns], whichever way round they lie in memory, and their type."""

_BLOCK = 1 << 16
"""Elements that numpy widens at a time, so that they stay in the second-level cache."""


class Reader(Struct, kw_only=True, eq=False):
    """One worker's memory for the factors of one module after the other, from `files` that all may share."""

    files: OpenFiles
    _room: Room = field(default_factory=Room)

    def gram(self, parts: Sequence[StoredTensor], *, below: bool) -> Matrix:
        """Return PᵀP of P = [P₁ | P₂ | …]; `below`: of its transposed, the parts below one another.

        Raises `SourceChanged`, `CorruptFile`.
        """
        total = sum(part.shape[0 if below else 1] for part in parts)
        gram = np.zeros((total, total))
        with np.errstate(all="ignore"):  # NaN and infinity are refused by name
            for block in self._blocks(parts, total, below=below):
                gram += block.T @ block
        return gram

    def triangle(self, parts: Sequence[StoredTensor], *, below: bool) -> Matrix:
        """Return R of the thin factorisation of what `gram` is the square of."""
        total = sum(part.shape[0 if below else 1] for part in parts)
        triangle = np.zeros((0, total))
        for block in self._blocks(parts, total, below=below):
            triangle = np.asarray(np.linalg.qr(np.concatenate([triangle, block]), mode="r"))
        return triangle

    def _blocks(self, parts: Sequence[StoredTensor], total: int, *, below: bool) -> Iterator[Matrix]:
        """Yield rows of the parts side by side in float64, at least as many as there are columns, but the last.

        The block is used again for the next.
        """
        step = max(total, _BLOCK // max(1, total))
        for some in self._pieces(parts, below=below):
            height = len(some[0][0])
            for at in range(0, height, step):
                rows = slice(at, min(at + step, height))
                # as the parts lie in memory, so that both are gone through in one direction
                shape = (rows.stop - at, total)
                block = self._room.of("block", shape[::-1] if below else shape, np.dtype(np.float64))
                block = block.T if below else block
                begin = 0
                for stored, dtype in some:
                    block[:, begin : begin + stored.shape[1]] = _wide(stored[rows], dtype)
                    begin += stored.shape[1]
                yield block

    def _pieces(self, parts: Sequence[StoredTensor], *, below: bool) -> Iterator[Sequence[Stored]]:
        for some in pieces(parts, self.files, self._room, below=below):
            yield [(stored.view(STORED[part.dtype]), part.dtype) for stored, part in zip(some, parts, strict=True)]


def _wide(some: NDArray[Any], dtype: DType) -> NDArray[Any]:
    return widened(some, dtype) if dtype is DType.BF16 else some
