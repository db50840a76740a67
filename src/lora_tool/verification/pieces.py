"""Which parts of a tensor are looked at: all of them in blocks, or rows and pieces from everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lora_tool.plan.core.ops import RowOp
from lora_tool.tensors import StoredTensor
from lora_tool.verification.files import Rows, rows_and_columns

BLOCK_WEIGHTS = 1 << 18
"""Weights of one product: enough rows that packing the factors costs little."""
CACHED_WEIGHTS = 1 << 16
"""Weights compared together: the intermediate results stay in the cache, and are too small to be mapped anew each time."""
PIECE_BYTES = 4 << 20
"""Bytes of a copied tensor compared together."""

SAMPLED_BYTES = 4096
SAMPLED_EVERY = 1 << 20
"""Of copied tensors, one stretch of `SAMPLED_BYTES` in every so many bytes is compared, besides both ends."""
_WHOLE_WEIGHTS = 1 << 14
"""Tensors up to this size are looked at whole, also where samples are asked for."""
_ROW_EVERY = 1 << 19
"""Weights of a merged tensor of which one row is recomputed: no more than the writer computes at a time."""


def blocks(tensor: StoredTensor) -> Iterator[Rows]:
    """Yield ranges of rows that cover the tensor, `BLOCK_WEIGHTS` at a time."""
    height, width = rows_and_columns(tensor.shape)
    step = max(1, BLOCK_WEIGHTS // max(1, width))
    for first in range(0, height, step):
        yield [(first, min(first + step, height))]


def split(rows: Rows, width: int) -> Iterator[Rows]:
    """Yield the same rows in the same order, `CACHED_WEIGHTS` at a time."""
    most = max(1, CACHED_WEIGHTS // max(1, width))
    part: list[tuple[int, int]] = []
    room = most
    for first, last in rows:
        at = first
        while at < last:
            taken = min(room, last - at)
            part.append((at, at + taken))
            at, room = at + taken, room - taken
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def sampled_rows(tensor: StoredTensor, op: RowOp) -> Iterator[Rows]:
    """Yield rows from everywhere: the first, the last, one of every stretch, the trained ones. The same each time."""
    height, width = rows_and_columns(tensor.shape)
    if height * width <= _WHOLE_WEIGHTS:
        yield from blocks(tensor)
        return
    stretch = max(1, _ROW_EVERY // max(1, width))
    chance = random.Random(tensor.name)  # noqa: S311 - a sample, not a secret
    chosen = {0, height - 1}
    chosen |= {chance.randrange(first, min(first + stretch, height)) for first in range(0, height, stretch)}
    chosen |= set(op.special_rows)
    yield from _grouped(sorted(chosen), max(1, BLOCK_WEIGHTS // max(1, width)))


def _grouped(rows: list[int], most: int) -> Iterator[Rows]:
    for at in range(0, len(rows), most):
        yield [(row, row + 1) for row in rows[at : at + most]]


def stretches(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield start and size in bytes of pieces that cover the tensor."""
    for start in range(0, tensor.nbytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, tensor.nbytes - start)


def sampled_stretches(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield start and size in bytes of pieces from everywhere, both ends among them. The same each time."""
    if tensor.nbytes <= 4 * SAMPLED_BYTES:
        yield from stretches(tensor)
        return
    chance = random.Random(tensor.name)  # noqa: S311 - a sample, not a secret
    last = tensor.nbytes - SAMPLED_BYTES
    yield 0, SAMPLED_BYTES
    for start in range(SAMPLED_BYTES, last, SAMPLED_EVERY):
        yield min(start + chance.randrange(SAMPLED_EVERY) // SAMPLED_BYTES * SAMPLED_BYTES, last), SAMPLED_BYTES
    yield last, SAMPLED_BYTES
