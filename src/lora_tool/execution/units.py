"""Cutting a plan's shards into units of work: pieces that one worker can do alone, of about the same cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tool.actions import NEW
from lora_tool.formats.quantised.grids import grid_of
from lora_tool.plan.core.ops import Computed, RowOp, row_ops
from lora_tool.plan.core.requantise import QuantisedPart, Requantise
from lora_tool.plan.core.steps import Shard
from lora_tool.tensors import Span, StoredTensor, TensorSpec, TiledSpan

COPY_BYTES = 32 << 20
"""Bytes per copying unit: large enough that system calls cost nothing, small enough to balance and to interrupt."""

_BATCH_BYTES = 4 << 20
_SHORT_BYTES = 64 << 10
_GATHER_BYTES = 1 << 18
"""Bytes per gathering unit: what lies in small pieces, or side by side, is put together in the second-level cache."""

UNIT_WEIGHTS = 1 << 22
"""Weights per computing unit, a multiple of what a block holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyUnit:
    """`nbytes` bytes of `source` from `offset`, to byte `begin` of the shard file."""

    source: Path
    offset: int
    nbytes: int
    begin: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherUnit:
    """`nbytes` bytes of a tensor from its byte `start`, which lie in small pieces, to byte `begin` of the file."""

    source: StoredTensor
    start: int
    nbytes: int
    begin: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeUnit:
    """Rows `first` to `last` of what `op` makes, which is `out` and begins at byte `at` of the shard file."""

    out: TensorSpec
    op: RowOp
    is_new: bool
    """Whether the base has no such values, so that each is looked at."""
    first: int
    last: int
    at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the output; of the whole where it is a scalar."""
        return self.out.nbytes // self.out.shape[0] if self.out.shape else self.out.nbytes

    @property
    def begin(self) -> int:
        """Where in the shard file its bytes begin."""
        return self.at + self.first * self.row_bytes

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequantiseUnit:
    """Rows `first` to `last` of scales, or the codes that have those scales, of `out`, which begins at byte `at` of the
    shard file.
    """

    out: TensorSpec
    op: Requantise[Computed]
    first: int
    last: int
    at: int

    def place(self, first: int, last: int) -> tuple[int, int]:
        """Return where in the shard file what belongs to these rows of scales begins, and its size in bytes."""
        if self.op.part is QuantisedPart.CODES:
            first, last = grid_of(self.op.encoding).rows_of(first, last)
        row_bytes = self.out.nbytes // self.op.shape[0]
        return self.at + first * row_bytes, (last - first) * row_bytes

    @property
    def begin(self) -> int:
        """Where in the shard file its bytes begin."""
        return self.place(self.first, self.last)[0]

    @property
    def nbytes(self) -> int:
        return self.place(self.first, self.last)[1]


Unit = CopyUnit | GatherUnit | ComputeUnit | RequantiseUnit


def computed_by(unit: Unit) -> tuple[RowOp, ...]:
    """Return the operations whose arithmetic a unit needs; none for one that moves bytes."""
    match unit:
        case ComputeUnit():
            return (unit.op,)
        case RequantiseUnit():
            return row_ops(unit.op)
        case _:
            return ()


def units_of(shard: Shard, *, whole: Callable[[RowOp], bool]) -> Iterator[Unit]:
    """Yield units that cover the shard's data exactly once, in file order; neighbouring copies are joined.

    `whole` says whether all rows of an operation are one unit, because the bits of its arithmetic depend on the shape;
    those of one that needs all rows always are. What an adapter saved whole is computed, too, although it is only copied:
    no other code checks its values.
    """
    pending: list[CopyUnit] = []
    at = len(shard.header)
    for step in shard.steps:
        if isinstance(step.op, Requantise):
            yield from _joined(pending)
            pending = []
            grid = grid_of(step.op.encoding)
            for first, last in grid.stretches(0, grid.down, UNIT_WEIGHTS):
                yield RequantiseUnit(out=step.out, op=step.op, first=first, last=last, at=at)
            at += step.out.nbytes
            continue
        for op in row_ops(step.op):
            # a stack of experts is worked on row by row
            out = step.out if op.shape == step.out.shape else replace(step.out, shape=op.shape)
            is_new = step.action in NEW
            if op.is_copy and not (is_new and out.dtype.is_float):
                for unit in _copies(op.source, at):
                    if isinstance(unit, CopyUnit):
                        pending.append(unit)
                    else:
                        yield from _joined(pending)
                        pending = []
                        yield unit
            else:
                yield from _joined(pending)
                pending = []
                yield from _computes(out, op, at, is_new=is_new, whole=op.needs_all_rows or whole(op))
            at += out.nbytes
    yield from _joined(pending)


def batches(units: Iterable[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Yield neighbouring units together until they make a few MB: thousands of tiny ones cost more to hand out."""
    batch: list[Unit] = []
    held = 0
    for unit in units:
        batch.append(unit)
        held += unit.nbytes
        if held >= _BATCH_BYTES:
            yield tuple(batch)
            batch, held = [], 0
    if batch:
        yield tuple(batch)


def _copies(source: StoredTensor, at: int) -> Iterator[CopyUnit | GatherUnit]:
    start = 0
    for is_short, some in itertools.groupby(source.spans, key=_is_short):
        spans = list(some)
        if is_short and len(spans) > 1:  # one alone may be joined with its neighbours in the file
            nbytes = sum(span.nbytes for span in spans)
            yield from _gathered(source, start, nbytes, at, _GATHER_BYTES)
            start += nbytes
            continue
        for span in spans:
            if isinstance(span, TiledSpan):
                rows = max(1, _GATHER_BYTES // span.row_bytes) * span.row_bytes
                yield from _gathered(source, start, span.nbytes, at, rows)
            else:
                yield CopyUnit(source=span.path, offset=span.offset, nbytes=span.nbytes, begin=at + start)
            start += span.nbytes


def _is_short(span: Span) -> bool:
    """Return whether a span costs less to read into its place in a block than to copy by itself."""
    return type(span) is Span and span.nbytes < _SHORT_BYTES


def _gathered(source: StoredTensor, start: int, nbytes: int, at: int, step: int) -> Iterator[GatherUnit]:
    """Yield units of at most `step` bytes for the tensor's bytes from `start`; the tensor begins at byte `at`."""
    for done in range(start, start + nbytes, step):
        yield GatherUnit(source=source, start=done, nbytes=min(step, start + nbytes - done), begin=at + done)


def _joined(copies: Sequence[CopyUnit]) -> Iterator[CopyUnit]:
    start = 0
    for end in range(1, len(copies) + 1):
        if end == len(copies) or not _adjacent(copies[end - 1], copies[end]):
            if end - start == 1 and 0 < copies[start].nbytes <= COPY_BYTES:
                yield copies[start]
            else:
                yield from _cut(copies[start], sum(copy.nbytes for copy in copies[start:end]))
            start = end


def _cut(first: CopyUnit, total: int) -> Iterator[CopyUnit]:
    """Yield units that copy `total` bytes from where the `first` begins."""
    for done in range(0, total, COPY_BYTES):
        nbytes = min(COPY_BYTES, total - done)
        yield CopyUnit(source=first.source, offset=first.offset + done, nbytes=nbytes, begin=first.begin + done)


def _adjacent(left: CopyUnit, right: CopyUnit) -> bool:
    # paths last: comparing two takes as long as everything else here
    follows = left.offset + left.nbytes == right.offset and left.begin + left.nbytes == right.begin
    return follows and left.source == right.source


def _computes(out: TensorSpec, op: RowOp, at: int, *, is_new: bool, whole: bool) -> Iterator[ComputeUnit]:
    if out.numel == 0:
        return
    rows = out.shape[0] if out.shape else 1
    per_unit = rows if whole else max(1, UNIT_WEIGHTS // (out.numel // rows))
    for first in range(0, rows, per_unit):
        yield ComputeUnit(out=out, op=op, is_new=is_new, first=first, last=min(first + per_unit, rows), at=at)
