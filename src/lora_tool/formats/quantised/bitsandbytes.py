"""The layouts of bitsandbytes: the packed quant state of four-bit weights, and the row scales of eight-bit ones."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from typing import Any

from lora_tool.core.tensors import FLOAT_NAMES, DType, StoredTensor, TensorSpec
from lora_tool.formats.quantised.encodings import Bnb4, BnbInt8, Encoding, NestedScales
from lora_tool.formats.quantised.parts import MATRIX, LayoutError, Parts
from lora_tool.formats.stored import read_part

STATE = ".quant_state.bitsandbytes__"
"""Stands in the name of the tensor that says shape and type of a four-bit weight, before the kind of its levels."""
_JSON_BYTES = 1 << 16
_OFFSET = "nested_offset"
_MOST = 3.4028234663852886e38
"""The largest float32."""
_NIBBLE = 4
_TYPES = {name: dtype for dtype, name in FLOAT_NAMES.items()}


def int8(parts: Parts, name: str, largest: StoredTensor) -> Encoding:
    """Return the eight-bit weight whose rows' scales are `largest`, the tensor `name`. Raises `LayoutError`."""
    module = name.removesuffix(".SCB")
    codes = parts.needed(f"{module}.weight", largest, (DType.I8,))
    if len(codes.shape) != MATRIX:
        raise LayoutError(codes, f"is {list(codes.shape)}; expected a matrix")
    parts.needed(name, codes, (DType.F32,), codes.shape[0])
    layout = parts.tensors.get(f"{module}.weight_format")
    if layout is not None and any(read_part(layout, 0, min(layout.nbytes, MATRIX))):
        raise LayoutError(
            layout, "says that int8 is not stored row by row; lora-tool does not read that layout", is_fault=False
        )
    spec = TensorSpec(name=codes.name, dtype=DType.F32, shape=codes.shape)
    return BnbInt8(spec=spec, codes=codes, label="int8 of bitsandbytes", largest=largest, record=layout)


def four_bits(parts: Parts, name: str, state: StoredTensor) -> Encoding:
    """Return the four-bit weight whose quant state is the tensor `name`, `state`. Raises `LayoutError`."""
    weight, _, kind = name.partition(STATE)
    said = _state(state)
    shape, block, dtype = said.get("shape"), said.get("blocksize"), _TYPES.get(str(said.get("dtype")))
    sizes = tuple(shape) if isinstance(shape, list) else ()
    sound = len(sizes) == MATRIX and all(type(n) is int and n > 0 for n in sizes)
    if not sound or dtype is None or type(block) is not int or block < 1 or block % 2:
        raise LayoutError(state, "does not give the shape, blocksize and dtype of a matrix")
    size = math.prod(sizes)
    codes = parts.tensors.get(weight)
    if codes is None or codes.nbytes != -(-size // 2):
        found = f"{codes.nbytes} bytes" if codes else "not there"
        raise LayoutError(state, f"says that `{weight}` is {shape}, {-(-size // 2)} bytes; found: {found}")
    scales, nested = _scales(parts, weight, codes, -(-size // block), said)
    return Bnb4(
        spec=TensorSpec(name=weight, dtype=dtype, shape=sizes),
        codes=codes,
        label=f"{kind}{'-double' if nested else ''} of bitsandbytes",
        levels=_levels(parts, f"{weight}.quant_map", codes, 1 << _NIBBLE),
        scales=scales,
        block=block,
        record=state,
    )


def _scales(
    parts: Parts, weight: str, codes: StoredTensor, blocks: int, said: Mapping[str, Any]
) -> tuple[StoredTensor | NestedScales, bool]:
    scales = parts.needed(f"{weight}.absmax", codes, (DType.F32, DType.U8), blocks)
    if scales.dtype is DType.F32:
        return scales, False
    block, offset = said.get("nested_blocksize"), said.get(_OFFSET)
    if type(block) is not int or block < 1 or not isinstance(offset, int | float) or not abs(offset) <= _MOST:
        raise LayoutError(codes, "does not give nested_blocksize and nested_offset")
    return NestedScales(
        codes=scales,
        levels=_levels(parts, f"{weight}.nested_quant_map", codes, 256),
        scales=parts.needed(f"{weight}.nested_absmax", codes, (DType.F32,), -(-blocks // block)),
        block=block,
        offset=offset,
    ), True


def _levels(parts: Parts, name: str, codes: StoredTensor, count: int) -> StoredTensor:
    """Return the tensor of `count` levels. Levels of unused codes may have any value, but a level that is not finite
    means a damaged table: no library writes one.
    """
    levels = parts.needed(name, codes, (DType.F32,), count)
    numbers = array("f", read_part(levels, 0, levels.nbytes))
    odd = next((at for at, number in enumerate(numbers) if not math.isfinite(number)), None)
    if odd is not None:
        raise LayoutError(levels, f"has {numbers[odd]} as level {odd}: expected {count} finite numbers")
    return levels


def _state(tensor: StoredTensor) -> dict[str, Any]:
    """Return the JSON object that bitsandbytes packed into a tensor of bytes."""
    try:
        found = json.loads(read_part(tensor, 0, min(tensor.nbytes, _JSON_BYTES)))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise LayoutError(tensor, "holds no JSON object")
    return found
