"""What quantised weights are to those who take their codes for numbers: so that a wrong merge is told by its cause.

Such a reading is the second formula with 1 in the place of every scale. Where that gives the values of a merged model,
another tool added ΔW to the codes, or copied them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from lora_tool.core.choices import assert_never
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import (
    Bnb4,
    BnbInt8,
    ColumnIntegers,
    Encoding,
    Fp4,
    NestedScales,
    OffsetIntegers,
    PackedIntegers,
    RoundedAs,
    Tiled,
)
from lora_tool.formats.quantised.grids import Requantisable
from lora_tool.verification.dequantised import Array, ReadBytes, dequantised_again

_Bytes = NDArray[np.uint8]
Decode = Callable[[Encoding, int, int, ReadBytes], Array]
"""Returns rows of a weight, in the form of `dequantised_again`; the encoding that it is called with does not count."""

_ONE = {DType.F32: 0x3F800000, DType.BF16: 0x3F80, DType.F16: 0x3C00, DType.F8_E4M3: 0x38}
"""The bits of 1 as a scale is stored; the others are powers of two in eight bits, byte - 127."""
_127 = 0x42FE0000
"""The bits of 127 as float32, by which LLM.int8() divides the scale of a row."""
_SCALES = "its scales were not applied"


def codes_of(encoding: Requantisable) -> Decode:
    """Return what reads the codes of a weight as numbers, less their zero points."""
    if isinstance(encoding, BnbInt8):
        return _reading(encoding, {encoding.largest.name: _all(DType.F32, _127)})
    return _reading(encoding, _ones(encoding.scales))


def readings_without_scales(encoding: Encoding) -> Iterator[tuple[str, Decode]]:
    """Yield what reads a weight without its scales, and without its zero points, too, and what is left out in words."""
    match encoding:
        case OffsetIntegers():
            yield _SCALES, codes_of(encoding)
            raw = {**_ones(encoding.scales), encoding.zeros.name: _none}
            yield "neither its scales nor its zero points were applied", _reading(encoding, raw)
        case Tiled() | BnbInt8() | PackedIntegers():
            yield _SCALES, codes_of(encoding)
        case ColumnIntegers():
            yield _SCALES, _reading(encoding, _ones(encoding.scales))
        case Fp4():
            yield _SCALES, _reading(replace(encoding, overall=None), _ones(encoding.scales))
            if encoding.overall is not None:
                yield _SCALES, _reading(encoding, _ones(encoding.scales))
        case Bnb4():
            yield _SCALES, _levels_of(encoding)
        case RoundedAs():
            return  # a plain weight, which has no scales
        case _:
            assert_never(encoding)


def _levels_of(encoding: Bnb4) -> Decode:
    scales = encoding.scales
    if isinstance(scales, NestedScales):
        plain = replace(encoding, scales=replace(scales, offset=0.0))
        return _reading(plain, _ones(scales.levels, scales.scales))
    return _reading(encoding, _ones(scales))


_Changes = Mapping[str, Callable[[_Bytes], _Bytes]]
"""Tensor on disk → what makes of its bytes what they are taken for."""


def _reading(encoding: Encoding, changes: _Changes) -> Decode:
    def decode(_encoding: Encoding, first: int, last: int, read: ReadBytes) -> Array:
        def taken(tensor: StoredTensor, start: int, nbytes: int) -> _Bytes:
            raw = read(tensor, start, nbytes)
            change = changes.get(tensor.name)
            return raw if change is None else change(raw)

        return dequantised_again(encoding, first, last, taken)

    return decode


def _ones(*scales: StoredTensor) -> _Changes:
    return {each.name: _all(each.dtype, _ONE.get(each.dtype, 127)) for each in scales}


def _all(dtype: DType, bits: int) -> Callable[[_Bytes], _Bytes]:
    size = dtype.bits // 8
    return lambda raw: np.full(raw.size // size, bits, f"<u{size}").view(np.uint8)


def _none(raw: _Bytes) -> _Bytes:
    return np.zeros_like(raw)
