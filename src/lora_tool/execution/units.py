"""Cutting a plan's shards into units of work: pieces for one worker each, of about the same cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.tensors import NEW, Span, StoredTensor, TensorAction, TensorSpec, TiledSpan
from lora_tool.formats.quantised.encodings import encoding_of, rows_together
from lora_tool.formats.quantised.grids import grid_of, scales_of
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.ops import Cast, Computed, Dequantise, Op, RowOp, row_ops
from lora_tool.plans.core.requantise import QuantisedPart, Requantise, stored_parts
from lora_tool.plans.core.steps import Shard, Step

COPY_BYTES = 32 << 20
"""Bytes per copying unit: large enough that system calls cost nothing, small enough to balance and to interrupt."""

_SHORT_BYTES = 64 << 10
_GATHER_BYTES = 1 << 20
"""Bytes per gathering unit: small or interleaved pieces are assembled in a block that fits the second-level cache."""

_STACK = 3

UNIT_WEIGHTS = 1 << 22
"""Weights per computing unit, a multiple of a block's."""


class CopyUnit(Struct, frozen=True, kw_only=True):
    """`nbytes` bytes of `source` from `offset`, to byte `begin` of the shard file."""

    source: Path
    offset: int
    nbytes: int
    begin: int


class GatherUnit(Struct, frozen=True, kw_only=True):
    """`nbytes` bytes of a tensor from its byte `start`, which lie in small pieces, to byte `begin` of the file."""

    source: StoredTensor
    start: int
    nbytes: int
    begin: int


class ComputeUnit(Struct, frozen=True, kw_only=True):
    """Rows `first` to `last` of the output of `op`, which is `out` and begins at byte `at` of the shard file."""

    out: TensorSpec
    op: RowOp
    is_new: bool
    """Whether these values are not the base's, so that each is checked for NaN and infinity."""
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


class RequantiseUnit(Struct, frozen=True, kw_only=True):
    """Rows `first` to `last` of scales, or the codes that have those scales, of `out`, which begins at byte `at` of the
    shard file.

    With codes their scales and zero points are written, too, where they are in the same file: all are made of the same
    numbers.
    """

    out: TensorSpec
    op: Requantise[Computed]
    first: int
    last: int
    at: int
    beside: tuple[tuple[QuantisedPart, int], ...] = ()
    """The parts written with the codes, and where each begins in the file."""

    @property
    def written(self) -> tuple[QuantisedPart, ...]:
        """The parts that the unit writes."""
        return self.op.part, *(part for part, _ in self.beside)

    def place(self, part: QuantisedPart, first: int, last: int) -> tuple[int, int]:
        """Return the offset in the shard file, and the size in bytes, of this part for these rows of scales."""
        encoding, grid = self.op.encoding, grid_of(self.op.encoding)
        at = dict(self.beside).get(part, self.at)
        match part:
            case QuantisedPart.CODES:
                first, last = grid.rows_of(first, last)
                row_bytes = encoding.codes.nbytes // grid.rows
            case QuantisedPart.SCALES:
                row_bytes = scales_of(encoding).nbytes // grid.down
            case QuantisedPart.ZEROS:  # the last may be filled up to whole words
                last, row_bytes = -(-last // grid.together) * grid.together, grid.across
        return at + first * row_bytes, (last - first) * row_bytes

    @property
    def begin(self) -> int:
        """Where in the shard file its bytes begin."""
        return self.place(self.op.part, self.first, self.last)[0]

    @property
    def nbytes(self) -> int:
        return sum(self.place(part, self.first, self.last)[1] for part in self.written)


Unit = CopyUnit | GatherUnit | ComputeUnit | RequantiseUnit


def computed_by(unit: Unit) -> tuple[RowOp, ...]:
    """Return the operations whose arithmetic a unit needs; none for one that moves bytes."""
    if isinstance(unit, ComputeUnit):
        return (unit.op,)
    return row_ops(unit.op) if isinstance(unit, RequantiseUnit) else ()


def units_of(shard: Shard, *, whole: Callable[[RowOp], bool]) -> Iterator[Unit]:
    """Yield units that cover the shard's data exactly once, in file order; neighbouring copies are joined.

    `whole` says whether all rows of an operation are one unit, because the bits of its arithmetic depend on the shape;
    those of one that needs all rows always are. Whole tensors of an adapter are computed, too, although they are
    only copied: no other code checks their values.
    """
    joined: CopyUnit | None = None
    for unit in _units(shard, whole):
        if joined is not None:
            if isinstance(unit, CopyUnit) and _adjacent(joined, unit):
                joined = replace(joined, nbytes=joined.nbytes + unit.nbytes)
                continue
            yield from _cut(joined)
        joined = unit if isinstance(unit, CopyUnit) else None
        if joined is None:
            yield unit
    if joined is not None:
        yield from _cut(joined)


def _units(shard: Shard, whole: Callable[[RowOp], bool]) -> Iterator[Unit]:
    """Yield the units of each step, copies as the spans of their sources are."""
    together: Mapping[str, int] | None = None
    at = len(shard.header)
    for step in shard.steps:
        if isinstance(step.op, Requantise):
            together = _parts_beside_codes(shard) if together is None else together
            yield from _requantised(step.out, step.op, at, together)
        else:
            yield from _units_of_rows(step, step.op, at, whole)
        at += step.out.nbytes


def _requantised(
    out: TensorSpec, op: Requantise[Computed], at: int, together: Mapping[str, int]
) -> Iterator[RequantiseUnit]:
    """Yield the units of codes with the parts that are `together` with them, and of parts that are in another file."""
    is_codes = op.part is QuantisedPart.CODES
    if not is_codes and out.name in together:
        return
    grid, own = grid_of(op.encoding), stored_parts(op.encoding)
    beside = tuple((part, together[own[part].name]) for part in own if own[part].name in together) if is_codes else ()
    for first, last in grid.stretches(0, grid.down, 4 * UNIT_WEIGHTS):
        yield RequantiseUnit(out=out, op=op, first=first, last=last, at=at, beside=beside)


def _units_of_rows(step: Step, made: Op, at: int, whole: Callable[[RowOp], bool]) -> Iterator[Unit]:
    is_new = step.action in NEW or step.action is TensorAction.DEQUANTISED  # a broken scale shows only here
    for op in _matrices(made):
        # a stack of experts is worked on row by row
        out = step.out if op.shape == step.out.shape else replace(step.out, shape=op.shape)
        if op.is_copy and not (is_new and out.dtype.is_float):
            yield from _copies(op.source, at)
        else:
            yield from _computes(out, op, at, is_new=is_new, whole=op.needs_all_rows or whole(op))
        at += out.nbytes


def _matrices(made: Op) -> Iterator[RowOp]:
    """Yield the operations that make the output's rows; those that change the type of a stack for each of its matrices."""
    for op in row_ops(made):
        if isinstance(op, Cast | Dequantise) and len(op.shape) == _STACK:
            matrices, rows, _ = op.shape
            yield from (part for at in range(matrices) for part in op.cut(at * rows, rows))
        else:
            yield op


def _parts_beside_codes(shard: Shard) -> dict[str, int]:
    """Return scales and zero points that are in the file of their codes, by name, and where they begin in it."""
    at, parts, codes = len(shard.header), {}, set()
    for step in shard.steps:
        if isinstance(step.op, Requantise):
            if step.op.part is QuantisedPart.CODES:
                codes |= {tensor.name for tensor in stored_parts(step.op.encoding).values()}
            else:
                parts[step.out.name] = at
        at += step.out.nbytes
    return {name: begin for name, begin in parts.items() if name in codes}


def _copies(source: StoredTensor, at: int) -> Iterator[CopyUnit | GatherUnit]:
    start = 0
    for is_short, some in itertools.groupby(source.spans, key=_is_short):
        spans = list(some)
        if is_short and len(spans) > 1:  # a single span may be joined with its neighbours in the file
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
    """Return whether a span costs less to read into its place in a block than to copy on its own."""
    return type(span) is Span and span.nbytes < _SHORT_BYTES


def _gathered(source: StoredTensor, start: int, nbytes: int, at: int, step: int) -> Iterator[GatherUnit]:
    """Yield units of at most `step` bytes for the tensor's bytes from `start`; the tensor begins at byte `at`."""
    for done in range(start, start + nbytes, step):
        yield GatherUnit(source=source, start=done, nbytes=min(step, start + nbytes - done), begin=at + done)


def _cut(copy: CopyUnit) -> Iterator[CopyUnit]:
    """Yield units that copy the same, none of more than `COPY_BYTES`."""
    for done in range(0, copy.nbytes, COPY_BYTES):
        nbytes = min(COPY_BYTES, copy.nbytes - done)
        yield CopyUnit(source=copy.source, offset=copy.offset + done, nbytes=nbytes, begin=copy.begin + done)


def _adjacent(left: CopyUnit, right: CopyUnit) -> bool:
    # paths last: comparing two takes as long as everything else here
    follows = left.offset + left.nbytes == right.offset and left.begin + left.nbytes == right.begin
    return follows and left.source == right.source


def _computes(out: TensorSpec, op: RowOp, at: int, *, is_new: bool, whole: bool) -> Iterator[ComputeUnit]:
    if out.numel == 0:
        return
    rows = out.shape[0] if out.shape else 1
    encoding = None if isinstance(op, FactorOp) else encoding_of(op.source)
    together = encoding and rows_together(encoding)
    per_unit = rows if whole else together or max(1, UNIT_WEIGHTS // (out.numel // rows))
    for first in range(0, rows, per_unit):
        yield ComputeUnit(out=out, op=op, is_new=is_new, first=first, last=min(first + per_unit, rows), at=at)
