"""The pieces of a tensor that several files hold: rectangles of its shape, and the proof that they fill it once.

Every way to cut a tensor is a case of this: rows (FSDP2), rows and columns (FSDP2 with tensor parallelism), and the
flat partitions of ZeRO and FSDP1, which are rectangles of the one dimension that all its elements make. Whoever reads a
format says where each piece begins and which bytes it is; `assembled` says where the tensor's bytes are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lora_tool.core.tensors import Span, StoredTensor, TensorSpec, Tile, TiledSpan, TransposedSpan, contiguous

_LONG_RUN = 64 << 10
"""Bytes of one row of a piece from which on each is a span of its own, and is copied without a detour."""
_MOST_CUTS = 10_000_000
"""Comparisons for pieces that are in no grid: hundreds of thousands of them would take hours."""
_DIMENSIONS = ("rows", "columns")

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A rectangle of a tensor: `sizes` elements from `offsets` on, whose bytes in row-major order are `span`."""

    offsets: Shape
    sizes: Shape
    span: Span


class _Part(NamedTuple):
    """A piece on the way through its dimensions; its remainder begins `skipped` elements after its beginning."""

    piece: Piece
    skipped: int = 0


class _Uncovered(Exception):
    """Which part of a tensor is in no piece or in two, as the end of a sentence."""


def uncovered(shape: Shape, pieces: Sequence[Piece], *, flat: bool = False) -> str | None:
    """Return which part of a tensor of this shape is in none of its `pieces`, or in two; None where all is there once.

    `flat` where the pieces are of the one dimension that its elements make in row-major order.
    """
    grid = (math.prod(shape),) if flat else shape
    if 0 in grid and any(0 not in piece.sizes for piece in pieces):
        return "its parts have elements, but the tensor is empty"
    try:
        _require_cover(grid, _parts(grid, pieces), ("elements",) if flat else _DIMENSIONS)
    except _Uncovered as found:
        return str(found)
    return None


def assembled(spec: TensorSpec, pieces: Sequence[Piece], *, flat: bool = False) -> StoredTensor:
    """Return the tensor that its `pieces`, of its own type, make; at least one, also where it is empty.

    `flat` as for `uncovered`. Raises ValueError with what that says for pieces that do not fill it once.
    """
    grid = (spec.numel,) if flat else spec.shape
    lacking = uncovered(spec.shape, pieces, flat=flat)
    if lacking:
        raise ValueError(lacking)
    if len(pieces) > 1 and any(isinstance(piece.span, TransposedSpan) for piece in pieces):
        raise ValueError(f"its {len(pieces)} pieces are stored transposed")
    size, rest = divmod(spec.dtype.bits, 8)
    if rest and len(pieces) > 1:
        raise ValueError(f"its {len(pieces)} pieces are of {spec.dtype}, whose elements are smaller than a byte")
    parts = _parts(grid, pieces)
    if len(parts) == 1 or not spec.nbytes:
        first = parts[0].piece.span if parts else pieces[0].span.part(0, 0)
        return StoredTensor(spec=spec, spans=(first,))
    return StoredTensor(spec=spec, spans=contiguous(_spans(grid, parts, 0, size)))


def _parts(grid: Shape, pieces: Sequence[Piece]) -> list[_Part]:
    """Return the pieces without empty ones, which a rank may write that has no share of a small tensor."""
    return [] if 0 in grid else [_Part(piece) for piece in pieces if 0 not in piece.sizes]


def _require_cover(grid: Shape, parts: Sequence[_Part], words: tuple[str, ...], known: tuple[str, ...] = ()) -> None:
    """Raise `_Uncovered` unless the parts fill the dimensions of `grid` behind the `known` ones once."""
    if 0 in grid:
        return
    at = len(known)
    if at == len(grid):
        if len(parts) != 1:
            where = ", ".join(filter(None, known)) or "its elements"
            raise _Uncovered(f"{where} are in {'two places' if parts else 'no file'}")
        return
    word = words[at] if at < len(words) else f"dimension {at}'s"
    for part in parts:
        end = part.piece.offsets[at] + part.piece.sizes[at]
        if end > grid[at]:
            raise _Uncovered(f"its parts have {end:,} {word}, but the tensor has {grid[at]:,}")
    for start, stop, inside in _bands(grid[at], parts, at):
        if len(inside) == 1 and _fills(grid, inside[0], at + 1):
            continue
        here = "" if (start, stop) == (0, grid[at]) else f"{word} {start:,} to {stop:,}"
        _require_cover(grid, inside, words, (*known, here))


def _fills(grid: Shape, part: _Part, at: int) -> bool:
    """Return whether the part fills all dimensions from `at` on."""
    return part.piece.sizes[at:] == grid[at:]


def _bands(size: int, parts: Sequence[_Part], at: int) -> Iterator[tuple[int, int, Sequence[_Part]]]:
    """Yield ranges that fill the dimension `at` of `size`, in order, each with the parts that lie across all of it."""
    groups: dict[tuple[int, int], list[_Part]] = {}
    for part in parts:
        groups.setdefault((part.piece.offsets[at], part.piece.sizes[at]), []).append(part)
    ranges = sorted((start, start + length) for start, length in groups)
    edges = [start for start, _ in ranges]
    if [0, *(stop for _, stop in ranges)] == [*edges, size]:  # a grid, as nearly all are
        for start, stop in ranges:
            yield start, stop, groups[start, stop - start]
        return
    cuts = sorted({0, size, *edges, *(stop for _, stop in ranges)})
    if len(cuts) * len(parts) > _MOST_CUTS:
        raise _Uncovered(f"its {len(parts):,} parts are in no order")
    for start, stop in itertools.pairwise(cuts):
        inside = [
            part
            for part in parts
            if part.piece.offsets[at] <= start and stop <= part.piece.offsets[at] + part.piece.sizes[at]
        ]
        yield start, stop, inside


def _spans(grid: Shape, parts: Sequence[_Part], at: int, size: int) -> Iterator[Span]:
    """Yield the spans of the dimensions from `at` on, which the parts are known to fill, in row-major order."""
    row_bytes = math.prod(grid[at + 1 :]) * size
    for start, stop, inside in _bands(grid[at], parts, at):
        moved = [_moved(part, at, start) for part in inside]
        if len(moved) == 1 and _fills(grid, moved[0], at + 1):
            yield _taken(moved[0], (stop - start) * row_bytes, size)
        elif all(_fills(grid, part, at + 2) for part in moved) and not _are_long(moved, at, size, stop - start):
            yield _side_by_side(grid, moved, at, size, rows=stop - start)
        else:
            for row in range(start, stop):
                yield from _spans(grid, [_moved(part, at, row) for part in inside], at + 1, size)


def _moved(part: _Part, at: int, index: int) -> _Part:
    """Return the part from `index` of the dimension `at` on."""
    piece = part.piece
    return part._replace(skipped=part.skipped + (index - piece.offsets[at]) * math.prod(piece.sizes[at + 1 :]))


def _taken(part: _Part, nbytes: int, size: int) -> Span:
    return part.piece.span.part(part.skipped * size, nbytes)


def _are_long(parts: Sequence[_Part], at: int, size: int, rows: int) -> bool:
    """Return whether rows of the parts are better copied one by one."""
    return rows == 1 or min(math.prod(part.piece.sizes[at + 1 :]) for part in parts) * size >= _LONG_RUN


def _side_by_side(grid: Shape, parts: Sequence[_Part], at: int, size: int, *, rows: int) -> TiledSpan:
    """Return rows that the parts hold side by side along the dimension after `at`."""
    inner = math.prod(grid[at + 2 :]) * size
    tiles = []
    for part in sorted(parts, key=lambda part: part.piece.offsets[at + 1]):
        width = part.piece.sizes[at + 1] * inner
        held = _taken(part, rows * width, size)
        tiles.append(Tile(held.path, held.offset, part.piece.offsets[at + 1] * inner, width))
    row_bytes = grid[at + 1] * inner
    first = tiles[0]
    return TiledSpan(
        path=first.path, offset=first.offset, nbytes=rows * row_bytes, tiles=tuple(tiles), row_bytes=row_bytes
    )
