"""Cutting a plan's shards into units of work: pieces that one worker can do alone, of about the same cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tool.actions import NEW
from lora_tool.plan.core.ops import Assemble, Copy, DoraDelta, LoraDelta
from lora_tool.plan.core.steps import Shard, Step

COPY_BYTES = 32 << 20
"""Bytes per copying unit: large enough that system calls cost nothing, small enough to balance and to interrupt."""

_BATCH_BYTES = 4 << 20

UNIT_WEIGHTS = 1 << 22
"""Weights per computing unit, a multiple of what a block holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyUnit:
    """`nbytes` bytes of `source` from `offset`, to byte `at` of the shard file."""

    source: Path
    offset: int
    nbytes: int
    at: int

    @property
    def begin(self) -> int:
        """Where in the shard file its bytes begin."""
        return self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeUnit:
    """Rows `first` to `last` of a step's output; the whole tensor begins at byte `at` of the shard file."""

    step: Step
    first: int
    last: int
    at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the output; of the whole where it is a scalar."""
        out = self.step.out
        return out.nbytes // out.shape[0] if out.shape else out.nbytes

    @property
    def begin(self) -> int:
        """Where in the shard file its bytes begin."""
        return self.at + self.first * self.row_bytes

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.row_bytes


Unit = CopyUnit | ComputeUnit


def units_of(shard: Shard, *, whole_tensors: bool = False) -> Iterator[Unit]:
    """Yield units that cover the shard's data exactly once, in file order; neighbouring copies are joined.

    With `whole_tensors` a computed tensor is one unit, for arithmetic whose bits depend on the shape. What an adapter
    saved whole is computed, too, though it stays as it is: nobody else looks at its values.
    """
    pending: list[CopyUnit] = []
    at = len(shard.header)
    for step in shard.steps:
        for part in _parts(step):
            if isinstance(part.op, Copy) and not (step.action in NEW and step.out.dtype.is_float):
                pending += _copies(part, at)
            else:
                yield from _joined(pending)
                pending = []
                yield from _computes(part, at, whole=whole_tensors)
            at += part.out.nbytes
    yield from _joined(pending)


def _parts(step: Step) -> Iterator[Step]:
    """Yield the step, or what it is assembled of, each as a step of its own."""
    for part in step.op.parts if isinstance(step.op, Assemble) else (step.op,):
        # a stack of experts is worked on row by row
        as_rows = part.source.shape != step.out.shape
        yield replace(step, out=replace(step.out, shape=part.source.shape), op=part) if as_rows else step


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


def _copies(step: Step, at: int) -> Iterator[CopyUnit]:
    for span in step.op.source.spans:
        yield CopyUnit(source=span.path, offset=span.offset, nbytes=span.nbytes, at=at)
        at += span.nbytes


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
        yield CopyUnit(source=first.source, offset=first.offset + done, nbytes=nbytes, at=first.at + done)


def _adjacent(left: CopyUnit, right: CopyUnit) -> bool:
    # paths last: comparing two takes as long as everything else here
    return (
        left.offset + left.nbytes == right.offset and left.at + left.nbytes == right.at and left.source == right.source
    )


def _computes(step: Step, at: int, *, whole: bool) -> Iterator[ComputeUnit]:
    if step.out.numel == 0:
        return
    rows = step.out.shape[0] if step.out.shape else 1
    columns_are_needed = isinstance(step.op, DoraDelta) and step.op.transposed
    whole = (whole and not isinstance(step.op, Copy)) or (isinstance(step.op, LoraDelta) and step.op.init is not None)
    per_unit = rows if whole or columns_are_needed else max(1, UNIT_WEIGHTS // (step.out.numel // rows))
    for first in range(0, rows, per_unit):
        yield ComputeUnit(step=step, first=first, last=min(first + per_unit, rows), at=at)
