"""The layouts of GPTQ and AWQ, which pack the codes of a weight that lies [in, out].

GPTQ stores zeros less one, and as they are where `checkpoint_format` is gptq_v2. The ones are taken from, and added to,
words of 32 bits, so that a zero of 0 borrows from its neighbour (GPTQModel's `convert_gptq_v1_to_v2_format_module`);
AWQ is that of AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.formats.quantised.encodings import ColumnIntegers, Encoding, PackedIntegers
from lora_tool.formats.quantised.parts import MATRIX, SCALES, LayoutError, Parts, groups_of_inputs
from lora_tool.formats.stored import read_part

_WORD = 32
_ADDED = {None: 1, "gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` → the number added to each stored zero point: GPTQ's first format stores them less one."""
_AWQ_BITS = 4


def columns(parts: Parts, table: Mapping[str, Any], name: str, codes: StoredTensor) -> Encoding:
    """Return the weight whose codes are the tensor `name`; `table` is the config's quantization table.

    Raises `LayoutError` for anything outside the two formats, and for unsupported orders and widths of codes.
    """
    module = name.removesuffix(".qweight")
    is_awq = table.get("quant_method") == "awq"
    kind = table.get("version" if is_awq else "checkpoint_format")
    known = (None, "gemm", "GEMM") if is_awq else tuple(_ADDED)
    if kind not in known:
        raise LayoutError(codes, f"is packed as {kind}, which lora-tool does not read", is_fault=False)
    scales = parts.needed(f"{module}.scales", codes, SCALES)
    zeros = parts.needed(f"{module}.qzeros", codes, (DType.I32,))
    bits = _bits(table, scales.shape[-1:], zeros.shape[-1:])
    if type(bits) is not int or bits not in ((_AWQ_BITS,) if is_awq else (2, 4, 8)):
        raise LayoutError(codes, f"has codes of {bits} bits, which lora-tool does not read", is_fault=False)
    each = _WORD // bits
    if codes.dtype is not DType.I32 or len(codes.shape) != MATRIX or len(scales.shape) != MATRIX or 0 in codes.shape:
        raise LayoutError(codes, f"is {codes.dtype} {list(codes.shape)} with scales of {list(scales.shape)}")
    inside, outputs = (codes.shape[0], codes.shape[1] * each) if is_awq else (codes.shape[0] * each, codes.shape[1])
    count = scales.shape[0]
    if scales.shape != (count, outputs) or zeros.shape != (count, -(-outputs // each)) or not 0 < count <= inside:
        raise LayoutError(
            codes,
            f"is {list(codes.shape)}, with scales of {list(scales.shape)} and zeros of {list(zeros.shape)}; expected "
            f"[groups, {outputs}] and [groups, {-(-outputs // each)}]",
        )
    group = _group(table, inside, count)
    if group is None:
        raise LayoutError(
            scales,
            f"has {count} groups of {inside} inputs, but the config says that groups are of {table.get('group_size')}",
        )
    if table.get("desc_act") is True and count > 1 and f"{module}.g_idx" not in parts.tensors:
        raise LayoutError(codes, f"has no `{module}.g_idx`, but the config says `desc_act`: its groups are in no order")
    return ColumnIntegers(
        spec=TensorSpec(name=f"{module}.weight", dtype=scales.dtype, shape=(outputs, inside)),
        codes=codes,
        label=f"{'awq' if is_awq else 'gptq'} int{bits} in groups of {group}",
        scales=scales,
        zeros=zeros,
        bits=bits,
        group=group,
        groups=groups_of_inputs(parts, f"{module}.g_idx", codes, inside, count),
        across=is_awq,
        added=0 if is_awq else _ADDED[kind] * sum(1 << at for at in range(0, _WORD, bits)),
    )


def _group(table: Mapping[str, Any], inside: int, count: int) -> int | None:
    """Return how many inputs share a scale, the last of a weight's groups cut off: as the config says for all or some
    modules, where there are as many groups; None where it says otherwise.
    """
    said = [each for each in (table.get("group_size"), *_of_some(table, "group_size")) if type(each) is int]
    sizes = (inside if each == -1 else each for each in said)
    found = next((each for each in sizes if each > 0 and -(-inside // each) == count), None)
    return -(-inside // count) if found is None and not said else found


def _of_some(table: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values that GPTQModel's `dynamic` gives some modules."""
    dynamic = table.get("dynamic")
    return [each.get(key) for each in dynamic.values() if isinstance(each, dict)] if isinstance(dynamic, dict) else []


def _bits(table: Mapping[str, Any], outputs: tuple[int, ...], words: tuple[int, ...]) -> object:
    """Return the width of codes: the config's, or one that GPTQModel's `dynamic` gives some modules, where zeros fit it."""
    said = table.get("bits", _AWQ_BITS)
    known = (each for each in (said, *_of_some(table, "bits")) if type(each) is int)
    return next((n for n in known if words == tuple(-(-size * n // _WORD) for size in outputs)), said)


# The layout of `pack-quantized` of compressed-tensors: integers of a few bits in words of 32, row by row.


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
