"""The layouts of GPTQ and AWQ, which pack the codes of a weight that lies [in, out].

GPTQ stores zeros less one, and as they are where `checkpoint_format` is gptq_v2. The ones are taken from, and added to,
words of 32 bits, so that a zero of 0 borrows from its neighbour (GPTQModel's `convert_gptq_v1_to_v2_format_module`);
AWQ is that of AutoAWQ's `WQLinear_GEMM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.formats.quantised.encodings import ColumnIntegers, Encoding
from lora_tool.formats.quantised.parts import MATRIX, SCALES, LayoutError, Parts, groups_of_inputs

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
