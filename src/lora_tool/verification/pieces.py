"""What a stored tensor is compared with, part by part; which rows or bytes of it: all, or some from everywhere; the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.quantised.grids import Requantisable
from lora_tool.plans.core.factor_ops import Mix
from lora_tool.plans.core.ops import Cast, Computed, Copy, Dequantise, LowRank, Op, RowOp, row_ops
from lora_tool.plans.core.requantise import Requantise
from lora_tool.plans.core.steps import Step

if TYPE_CHECKING:
    import random

Ranged = TypeVar("Ranged")
Rows = Sequence[tuple[int, int]]
"""Ranges of rows, first and last (not included)."""
Stretch = tuple[int, int]
"""Start and size in bytes."""

PRODUCT_WEIGHTS = 1 << 19
"""Weights of one product: enough rows that packing the factors costs little."""
CACHED_WEIGHTS = 1 << 16
"""Weights compared together: the intermediate results stay in the cache, and are too small to be mapped anew each time."""
_COLUMN_EVERY = 64
"""Columns of which one is recomputed."""
PIECE_BYTES = 4 << 20
"""Bytes of a copied tensor compared together."""

SAMPLED_BYTES = 4096
SAMPLED_EVERY = 1 << 20
"""Of copied tensors, one stretch of `SAMPLED_BYTES` in every so many bytes is compared, besides both ends."""
_MATRIX = 2
_WHOLE_WEIGHTS = 1 << 14
"""Tensors up to this size are looked at whole, also where samples are asked for."""
_ROW_EVERY, _CODED_ROW_EVERY = 1 << 19, 1 << 22
"""Weights of a merged tensor, and of one that is stored as codes, of which one row is recomputed: no more than the writer
computes at a time."""


class Compared(Struct, frozen=True, kw_only=True):
    """Elements of the tensor `name` from `begin`, as stored in the merged model, and the operation that makes them."""

    name: str
    op: RowOp | Requantise[Computed]
    stored: StoredTensor
    begin: int = 0
    written: Requantisable | None = None
    """The codes and scales in the merged model, where `stored` is one of them or what they stand for."""

    @property
    def copied(self) -> bool:
        """Whether it must be its source's bytes."""
        return self.op.is_copy

    @property
    def of_one_size(self) -> bool:
        """Whether its bytes tell if it is still its source: all that can be said of what is not recomputed."""
        source = self.op.source
        return self.stored.dtype is source.dtype and self.stored.nbytes == source.nbytes


def parts_of(step: Step, stored: StoredTensor) -> tuple[Compared, ...]:
    """Return the parts of a step's output, in the type and place where it is stored: each is what one operation makes."""
    parts = []
    begin = 0
    for op in row_ops(step.op):
        rows = _elements(stored, begin, op.shape)
        parts.append(Compared(name=step.out.name, op=_as_stored(op, stored), stored=rows, begin=begin))
        begin += math.prod(op.shape)
    return tuple(parts)


def _as_stored(op: RowOp, stored: StoredTensor) -> RowOp:
    """Return the operation for the type that the tensor was stored in: a tool may have been asked for another one."""
    if not op.keeps_values or isinstance(op, Dequantise):
        return op
    return Copy(source=op.source) if op.source.dtype is stored.dtype else Cast(source=op.source)


def _elements(stored: StoredTensor, begin: int, shape: tuple[int, ...]) -> StoredTensor:
    """Return as many elements as a tensor of this `shape` has: a stack of experts may be worked on row by row."""
    if shape == stored.shape:
        return stored
    spec = replace(stored.spec, shape=shape)
    spans = stored.spans if spec.numel == stored.spec.numel else stored.part(begin * spec.dtype.bits // 8, spec.nbytes)
    return StoredTensor(spec=spec, spans=tuple(spans))


def why_not(op: Op) -> str | None:
    """Return why the operation is not recomputed here, None where it is."""
    if isinstance(op, LowRank) and len(op.source.shape) != _MATRIX:
        return f"verify has no second formula for LoRA on a tensor of shape {list(op.source.shape)}"
    if not op.source.dtype.is_float:
        return f"{op.source.dtype} is not a float type"
    return None


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as rows of so many elements; a scalar is one row of one."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def rows_at_once(width: int, weights: int = PRODUCT_WEIGHTS) -> int:
    """Return how many rows of this width have about so many weights."""
    return max(1, weights // max(1, width))


def row_blocks(tensor: StoredTensor, weights: int = PRODUCT_WEIGHTS) -> Iterator[Rows]:
    """Yield ranges of rows that cover the tensor, each of about so many weights."""
    height, width = rows_and_columns(tensor.shape)
    step = rows_at_once(width, weights)
    for first in range(0, height, step):
        yield [(first, min(first + step, height))]


def split(rows: Rows, width: int) -> Iterator[Rows]:
    """Yield the same rows in the same order, `CACHED_WEIGHTS` at a time."""
    most = rows_at_once(width, CACHED_WEIGHTS)
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


def sampled_rows(tensor: StoredTensor, op: Op) -> Iterator[Rows]:
    """Yield rows from everywhere: the first, the last, one of every stretch, the trained ones. The same each time."""
    height, width = rows_and_columns(tensor.shape)
    if height * width <= _WHOLE_WEIGHTS:
        yield from row_blocks(tensor)
        return
    stretch = rows_at_once(width, _ROW_EVERY if encoding_of(tensor) is None else _CODED_ROW_EVERY)
    chance = _chance(tensor)
    chosen = {0, height - 1}
    chosen |= {chance.randrange(first, min(first + stretch, height)) for first in range(0, height, stretch)}
    chosen |= set(op.special_rows)
    yield from batched([(row, row + 1) for row in sorted(chosen)], rows_at_once(width))


def sampled_columns(tensor: StoredTensor, op: Op) -> Sequence[int]:
    """Return columns from everywhere, where a row of the output would need all of the inputs, and a column as many of
    their columns; none where rows will do. The same each time.
    """
    if not isinstance(op, Mix) or not op.below or tensor.spec.numel <= _WHOLE_WEIGHTS:
        return ()
    last = tensor.shape[1] - 1
    return sorted({0, last, *range(_chance(tensor).randrange(_COLUMN_EVERY), last, _COLUMN_EVERY)})


def stretches(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield start and size in bytes of pieces that cover the tensor."""
    for start in range(0, tensor.nbytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, tensor.nbytes - start)


def sampled_stretches(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield start and size in bytes of pieces from everywhere, both ends among them. The same each time."""
    if tensor.nbytes <= 4 * SAMPLED_BYTES:
        yield from stretches(tensor)
        return
    chance = _chance(tensor)
    last = tensor.nbytes - SAMPLED_BYTES
    yield 0, SAMPLED_BYTES
    for start in range(SAMPLED_BYTES, last, SAMPLED_EVERY):
        yield min(start + chance.randrange(SAMPLED_EVERY) // SAMPLED_BYTES * SAMPLED_BYTES, last), SAMPLED_BYTES
    yield last, SAMPLED_BYTES


def _chance(tensor: StoredTensor) -> random.Random:
    """Return what chooses samples of this tensor, the same each time."""
    import random  # small tensors are looked at whole

    return random.Random(tensor.name)  # noqa: S311 - a sample, not a secret


def batched(pieces: Sequence[Ranged], most: int) -> Iterator[Sequence[Ranged]]:
    """Yield the pieces in their order, at most so many together."""
    for at in range(0, len(pieces), most):
        yield pieces[at : at + most]


# How many values are wrong, how far off they are, and how much of ΔW is in the change.


class CannotTellError(Exception):
    """No bound would be honest: the base's spectrum, say, lets float32 take out visibly different parts."""


class Tally(Struct):
    """What was seen of one tensor so far. `squares` and `dot` are sums over the values compared."""

    compared: int = 0
    outside: int = 0
    """Values outside of the bound of the arithmetic that is stated, or of lora-tool's where none is."""
    wrong: int = 0
    """Values outside of the widest bound that may explain them."""
    first: int | None = None
    ulps: float = 0.0
    moved: bool = False
    """Whether a value is not the base's."""
    error_squares: float = 0.0
    change_squares: float = 0.0
    moved_squares: float = 0.0
    dot: float = 0.0
    unknown: str | None = None
    """Why no honest bound was found; then nothing was compared."""

    def add(self, other: Tally) -> None:
        """Take in what was seen of another part of the same tensor."""
        self.compared += other.compared
        self.outside += other.outside
        self.wrong += other.wrong
        self.error_squares += other.error_squares
        self.change_squares += other.change_squares
        self.moved_squares += other.moved_squares
        self.dot += other.dot
        self.moved = self.moved or other.moved
        self.unknown = self.unknown or other.unknown
        if other.first is not None:
            self.first = other.first if self.first is None else min(self.first, other.first)
        self.ulps = max(self.ulps, other.ulps)

    @property
    def distance(self) -> float | None:
        """‖W' - (W + ΔW)‖ / ‖ΔW‖."""
        return math.sqrt(self.error_squares / self.change_squares) if self.change_squares else None

    @property
    def factor(self) -> float | None:
        """⟨W' - W, ΔW⟩ / ‖ΔW‖²."""
        return self.dot / self.change_squares if self.change_squares else None

    @property
    def cosine(self) -> float | None:
        """Between W' - W and ΔW."""
        norms = math.sqrt(self.change_squares) * math.sqrt(self.moved_squares)
        return self.dot / norms if norms else None
