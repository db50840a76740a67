"""The layout of `pack-quantized` of compressed-tensors: integers of a few bits in words of 32, row by row."""

from __future__ import annotations

import math
from collections.abc import Collection

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.formats.quantised.encodings import Encoding, PackedIntegers
from lora_tool.formats.quantised.parts import MATRIX, SCALES, LayoutError, Parts, groups_of_inputs
from lora_tool.formats.stored import read_part


def packed(
    parts: Parts, known_bits: Collection[int], always: Collection[str], name: str, codes: StoredTensor
) -> Encoding:
    """Return the weight whose codes are the tensor `name`; `known_bits` are the widths of codes that the config names,
    `always` the name ends of the parts that every weight has by the config.

    Raises `LayoutError`, OSError.
    """
    weight = name.removesuffix("_packed")
    lost = next((f"{weight}{end}" for end in sorted(always) if f"{weight}{end}" not in parts.tensors), None)
    if lost is not None:
        raise LayoutError(codes, f"has no `{lost}`, but the config says that every weight has one")
    said = parts.needed(f"{weight}_shape", codes, (DType.I64, DType.I32), MATRIX)
    shape = _integers(said)
    fitting = [bits for bits in known_bits if codes.shape == (shape[0], -(-shape[1] * bits // 32))]
    if len(fitting) != 1 or min(shape) < 1:
        raise LayoutError(
            codes,
            f"is {list(codes.shape)} for a weight of {list(shape)}; the config names "
            f"{', '.join(map(str, sorted(known_bits))) or 'no'} bits",
        )
    (bits,) = fitting
    scales = parts.needed(f"{weight}_scale", codes, SCALES)
    count = 1 if math.prod(scales.shape) == 1 or scales.shape == shape[:1] else scales.shape[-1]
    if scales.shape not in {(), (1,), shape[:1], (1, 1), (shape[0], count)} or shape[1] % count:
        raise LayoutError(scales, f"is {list(scales.shape)} for a weight of {list(shape)}")
    zeros = parts.tensors.get(f"{weight}_zero_point")
    allowed: set[tuple[DType, tuple[int, ...]]] = {
        (DType.I8, (shape[0], count)),
        (DType.I32, (-(-shape[0] * bits // 32), count)),
    }
    if math.prod(scales.shape) == 1:  # which the library does not pack: they have one dimension
        allowed |= {(DType.I8, ()), (DType.I8, (1,)), (DType.I8, (1, 1))}
    if zeros is not None and (zeros.dtype, zeros.shape) not in allowed:
        raise LayoutError(zeros, f"is {zeros.dtype} {list(zeros.shape)} for {list(shape)}")
    return PackedIntegers(
        spec=TensorSpec(name=weight, dtype=scales.dtype, shape=shape),
        codes=codes,
        label=f"int{bits} in groups of {shape[1] // count}",
        scales=scales,
        zeros=zeros,
        bits=bits,
        group=shape[1] // count,
        groups=groups_of_inputs(parts, f"{weight}_g_idx", codes, shape[1], count, least=-1),
        record=said,
    )


def _integers(tensor: StoredTensor) -> tuple[int, ...]:
    data, size = read_part(tensor, 0, tensor.nbytes), tensor.dtype.bits // 8
    return tuple(int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size))
