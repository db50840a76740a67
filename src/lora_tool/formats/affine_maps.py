"""How DeepSpeed's AutoTP cut each parameter: rectangles of the whole and of each rank's slice, by its model files.

`module_inject/layers.py` (`collect_autotp_universal_checkpoint_info`) writes `universal_checkpoint_info.affine_map`,
and `checkpoint/affine.py` defines it (DeepSpeed 0.19.8): blocks of elements by offset and strides, as
`torch.as_strided` takes them, on both sides. DeepSpeed only makes rectangles; other blocks are not understood.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.pieces import Piece, Shape, pieces_along
from lora_tool.formats.torch_objects import is_sizes

_VERSION = 1
_NAME = re.compile(r"\^(?P<name>(?:[\w-]|\\.)+)\$\Z")


class Block(NamedTuple):
    """A rectangle of `sizes` elements, which begins `at` in the whole parameter and `held` in the slice of a rank."""

    sizes: Shape
    at: Shape
    held: Shape
    owner: int
    """The first of the ranks that hold it."""
    scale: float
    """What its elements were multiplied with."""


class Cut(NamedTuple):
    """How one parameter lies on the ranks of a tensor-parallel group."""

    shape: Shape
    slices: Mapping[int, Shape]
    """Rank → the shape of its slice."""
    blocks: Mapping[int, tuple[Block, ...]]


def read_cuts(info: object) -> dict[str, Cut] | None:
    """Return parameter → its cut from a model file's `universal_checkpoint_info`, None where that has no map.

    Leaves out entries it does not understand: of a newer version, for a pattern of names, with blocks that are not
    rectangles.
    """
    table = info.get("affine_map") if isinstance(info, dict) else None
    if not isinstance(table, dict) or not isinstance(table.get("params"), dict):
        return None
    if table.get("version") != _VERSION:
        return {}
    cuts = {}
    for pattern, entry in table["params"].items():
        match = _NAME.match(pattern) if isinstance(pattern, str) else None
        cut = _cut(entry)
        if match and cut:
            cuts[re.sub(r"\\(.)", r"\1", match["name"])] = cut
    return cuts


def _cut(entry: Any) -> Cut | None:  # noqa: ANN401 - of a pickle
    try:
        shape = _sizes(entry["logical_shape"])
        slices = {rank: _sizes(table["shard_shape"]) for rank, table in entry["ranks"].items() if type(rank) is int}
        blocks = {
            rank: tuple(_block(piece, shape, slices[rank]) for piece in entry["ranks"][rank]["pieces"])
            for rank in slices
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return Cut(shape, slices, blocks)


def _block(piece: Any, whole: Shape, part: Shape) -> Block:  # noqa: ANN401
    sizes, scale = _sizes(piece["shape"]), piece.get("scale", 1.0)
    if type(scale) not in (int, float):
        raise ValueError("a scale is not a number")
    return Block(
        sizes,
        _corner(piece["source"], sizes, whole),
        _corner(piece["dest"], sizes, part),
        min(_sizes(piece["locations"])),
        float(scale),
    )


def _corner(place: Any, sizes: Shape, around: Shape) -> Shape:  # noqa: ANN401
    """Return where a block begins in a tensor of the shape `around`. Raises ValueError for any but a rectangle."""
    offset, strides = place
    usual = [math.prod(around[at + 1 :]) for at in range(len(around))]
    same = all(size == 1 or stride == row for size, stride, row in zip(sizes, strides, usual, strict=True))
    corner = []
    for row in usual:
        corner.append(offset // row if row else 0)
        offset -= corner[-1] * row
    if not same or offset or any(a + size > most for a, size, most in zip(corner, sizes, around, strict=True)):
        raise ValueError("a block is not a rectangle")
    return _sizes(corner)


def _sizes(values: object) -> Shape:
    if not isinstance(values, list | tuple) or not is_sizes(tuple(values)):
        raise ValueError("no sizes")
    return tuple(values)


def cut_pieces(block: Block, part: StoredTensor) -> Iterator[Piece]:
    """Yield the pieces of the whole parameter that the block of the slice `part` of a rank holds."""
    sizes, around = block.sizes, part.shape
    # the last dimensions that it fills make one run of elements with the one before them
    run = next((at for at in reversed(range(1, len(sizes))) if sizes[at] != around[at]), 0)
    element = part.dtype.bits // 8
    for index in itertools.product(*map(range, sizes[:run])):
        inner = (*index, *(0 for _ in sizes[run:]))
        start = 0
        for size, at, moved in zip(around, block.held, inner, strict=True):
            start = start * size + at + moved
        taken = (*(1 for _ in index), *sizes[run:])
        spans = part.part(start * element, math.prod(taken) * element)
        yield from pieces_along(tuple(map(sum, zip(block.at, inner, strict=True))), taken, spans, element)
