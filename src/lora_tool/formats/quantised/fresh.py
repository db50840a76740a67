"""Numbers quantised afresh, with scales of their own, as bitsandbytes quantised the weight whose place they take.

Codes, scales, scales of scales and the mean of these are bit for bit those of bitsandbytes 0.50 for the same numbers,
on one thread of a CPU.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from lora_tool.formats.quantised import blockwise
from lora_tool.formats.quantised.arrays import F32, INT8_STEP, Read
from lora_tool.formats.quantised.encodings import BnbInt8, NestedScales
from lora_tool.formats.quantised.grids import Blockwise, block_of
from lora_tool.tensors import StoredTensor


class Levels(Struct, frozen=True, kw_only=True):
    """What codes stand for: the levels in ascending order, and the code of each. fp4 has two for zero."""

    values: tuple[float, ...]
    codes: NDArray[np.uint8]

    @classmethod
    def of(cls, tensor: StoredTensor, read: Read) -> Levels:
        """Return the levels in a table."""
        stored = read(tensor, 0, tensor.nbytes).view("<f4")
        order = np.argsort(stored, kind="stable")
        return cls(values=tuple(stored[order].tolist()), codes=order.astype(np.uint8))


def scales_of_blocks(encoding: Blockwise, values: F32) -> F32:
    """Return the scale of each block of flat values, before it is quantised itself."""
    if isinstance(encoding, BnbInt8):
        return blockwise.largest(_halves(values), block_of(encoding))
    found = blockwise.largest(values, encoding.block)
    if len(values) % encoding.block:
        found[-1] = max(found[-1], blockwise.LEAST)
    return found


def codes_of(encoding: Blockwise, values: F32, scales: F32, read: Read) -> NDArray[np.uint8]:
    """Return the codes of flat values, of whole blocks but for the last of all, as they are stored."""
    if isinstance(encoding, BnbInt8):
        rows = _halves(values).reshape(len(scales), -1)
        return blockwise.int8_rows(rows, scales).reshape(-1).view(np.uint8)
    levels = Levels.of(encoding.levels, read)
    codes = levels.codes[blockwise.nearest(values, scales, encoding.block, levels.values)]
    if len(codes) % 2:
        codes = np.append(codes, levels.codes[levels.values.index(0.0)])
    return np.asarray((codes[0::2] << 4) | codes[1::2], np.uint8)


def numbers_of(encoding: Blockwise, values: F32, scales: F32, read: Read, stored: F32 | None = None) -> F32:
    """Return what the codes of flat values stand for, with scales that are `stored` so, by default as they are."""
    block = block_of(encoding)
    spread = np.repeat(scales if stored is None else stored, block)[: len(values)]
    if isinstance(encoding, BnbInt8):
        codes = blockwise.int8_rows(_halves(values).reshape(len(scales), -1), scales)
        return np.asarray(codes.reshape(-1).astype(np.float32) * spread * INT8_STEP)
    levels = Levels.of(encoding.levels, read).values
    return np.asarray(np.array(levels, np.float32)[blockwise.nearest(values, scales, block, levels)] * spread)


def as_nested(nested: NestedScales, scales: F32, first: int, read: Read) -> F32:
    """Return the scales of blocks from `first`, quantised with the mean and the scales that `nested` has."""
    levels = np.array(Levels.of(nested.levels, read).values, np.float32)
    outer = read(nested.scales, 0, nested.scales.nbytes).view("<f4")[
        np.arange(first, first + len(scales)) // nested.block
    ]
    moved = np.clip((scales - np.float32(nested.offset)) / np.maximum(outer, blockwise.LEAST), -1, 1)
    near = np.searchsorted(blockwise.midpoints(tuple(levels.tolist())), moved)
    return np.asarray(levels[near] * outer + np.float32(nested.offset))


class OfScales(Struct, frozen=True, kw_only=True):
    """What is stored of a whole weight's scales where they are quantised themselves."""

    codes: NDArray[np.uint8]
    outer: F32
    mean: np.float32


def quantised_scales(nested: NestedScales, scales: F32, read: Read) -> OfScales:
    """Return the codes of all scales of a weight, the scales of these, and the mean that was subtracted."""
    levels = Levels.of(nested.levels, read)
    mean = blockwise.mean_in_order(scales)
    codes, outer = blockwise.nested(scales, mean, levels.values, from_table=True)
    return OfScales(codes=levels.codes[codes], outer=outer, mean=mean)


def _halves(values: F32) -> F32:
    """Return values rounded to float16, through which LLM.int8() quantises."""
    return values.astype(np.float16).astype(np.float32)
