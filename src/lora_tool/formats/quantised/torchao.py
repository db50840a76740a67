"""The layout of torchao: the metadata of the files gives the parts and the class of each weight.

`flatten_tensor_state_dict` (torchao 0.18) stores the parts of `M.weight` as `M._weight_qdata`, `M._weight_scale` and the
like. Each safetensors file has the metadata of the whole model: name of a weight → its class and what its constructor
takes, as JSON. A weight is again what `dequantize` of its class makes of the parts; no class is built here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.formats.quantised.encodings import Encoding, Fp4, OffsetIntegers, Tiled
from lora_tool.formats.quantised.parts import MATRIX, POWERS, SCALES, STACK, LayoutError, Parts, in_tiles
from lora_tool.formats.stored import read_part

CODES = "_qdata"
"""The end of the names of codes."""
_NAMES = "tensor_names"
_BYTE = 8
_PLAIN = json.dumps({"_type": "Tensor"})
_FP4 = {"MXTensor": (32, "mxfp4"), "NVFP4Tensor": (16, "nvfp4")}


def weight_of(name: str) -> str | None:
    """Return the weight whose codes are called so: `M.weight` for `M._weight_qdata`; None for other names."""
    above, _, leaf = name.rpartition(".")
    own = leaf.removesuffix(CODES)
    return f"{above}.{own[1:]}" if above and own != leaf and own.startswith("_") and own[1:] else None


def torchao(parts: Parts, metadata: Mapping[str, str], name: str, codes: StoredTensor) -> Encoding:
    """Return the weight whose codes are the tensor `name`; `metadata` is that of the files.

    Raises `LayoutError`, OSError.
    """
    weight = weight_of(name) or name
    kind, said = _said(metadata, weight, codes)
    how = _READERS.get(kind)
    if how is None:
        raise LayoutError(codes, f"is part of torchao's {kind}, which lora-tool does not read", is_fault=False)
    return how(_Weight(parts, weight, codes, kind), said)


def metadata_of(metadata: Mapping[str, str], names: Collection[str], quantised: Collection[str]) -> dict[str, str]:
    """Return the metadata of a model with these weights: entries of `metadata` for the `quantised`, plain ones else."""
    said = {name: metadata[name] if name in quantised else _PLAIN for name in names}
    return {**said, _NAMES: json.dumps(list(names)), "format": "pt"}


def is_told(encoding: Encoding) -> bool:
    """Return whether loaders tell how the weight is stored by the metadata of the files."""
    return weight_of(encoding.codes.name) == encoding.spec.name


def _said(metadata: Mapping[str, str], weight: str, codes: StoredTensor) -> tuple[str, Mapping[str, Any]]:
    """Return a weight's class, and its constructor's arguments."""
    try:
        found = json.loads(metadata.get(weight, ""))
    except ValueError:
        found = None
    kind, data = (found.get("_type"), found.get("_data")) if isinstance(found, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise LayoutError(codes, f"is part of `{weight}`, of which the metadata of the files does not say the class")
    return kind, data


class _Weight:
    """The parts of one weight."""

    def __init__(self, parts: Parts, name: str, codes: StoredTensor, kind: str) -> None:
        self.name, self.codes, self.kind = name, codes, kind
        self._parts, self._stem = parts, codes.name.removesuffix(CODES)

    def needed(self, part: str, dtypes: tuple[DType, ...], size: int | None = None) -> StoredTensor:
        return self._parts.needed(f"{self._stem}_{part}", self.codes, dtypes, size)

    def has(self, part: str) -> bool:
        return f"{self._stem}_{part}" in self._parts.tensors

    def spec(self, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(name=self.name, dtype=dtype, shape=shape)


def _tiled(weight: _Weight, said: Mapping[str, Any]) -> Encoding:
    """Return codes of eight bits with a scale for each block."""
    codes = weight.codes
    wanted = DType.F8_E4M3 if weight.kind == "Float8Tensor" else DType.I8
    if codes.dtype is not wanted:
        raise LayoutError(
            codes, f"is {codes.dtype}; lora-tool reads {wanted} as torchao's {weight.kind}", is_fault=False
        )
    tile, grid = _blocks(codes, said.get("block_size"))
    scales = _in_grid(weight.needed("scale", SCALES), codes, grid)
    zeros = _in_grid(weight.needed("zero_point", (DType.I8,)), codes, grid) if weight.has("zero_point") else None
    spec = weight.spec(DType.F32, codes.shape)
    bits = _bits(said)
    label = _label("fp8 e4m3" if wanted is DType.F8_E4M3 else f"int{bits}", tile, codes.shape)
    if zeros is None or (bits == _BYTE and not any(read_part(zeros, 0, zeros.nbytes))):
        return Tiled(spec=spec, codes=codes, label=label, scales=scales, tile=tile, record=zeros)
    return OffsetIntegers(spec=spec, codes=codes, label=label, scales=scales, zeros=zeros, tile=tile, bits=bits)


def _bits(said: Mapping[str, Any]) -> int:
    """Return of how many bits a byte of codes has values: torch's integers of fewer have no bytes of their own."""
    target = said.get("target_dtype")
    name = target.get("_data") if isinstance(target, dict) else None
    digits = name.removeprefix("int") if isinstance(name, str) else ""
    return int(digits) if digits in {str(bits) for bits in range(1, _BYTE)} else _BYTE


def _blocks(codes: StoredTensor, block: object) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the rows and columns of a block, and how many blocks there are along each dimension."""
    sizes = tuple(block) if isinstance(block, list) else ()
    if not MATRIX <= len(codes.shape) <= STACK or 0 in codes.shape:
        raise LayoutError(codes, f"is {list(codes.shape)}; expected a matrix or a stack of them", is_fault=False)
    if not sizes and block in (None, []):
        sizes = codes.shape
    sound = len(sizes) == len(codes.shape) and all(type(n) is int and n > 0 for n in sizes)
    if not sound or any(size % n for size, n in zip(codes.shape, sizes, strict=True)):
        raise LayoutError(codes, f"is {list(codes.shape)}, which blocks of {block} do not fill")
    if len(sizes) == STACK and sizes[0] not in (1, codes.shape[0]):
        raise LayoutError(codes, f"has blocks of {block}, which lora-tool does not read", is_fault=False)
    tile = sizes[-2], sizes[-1]
    return tile, tuple(size // n for size, n in zip(codes.shape, sizes, strict=True))


def _in_grid(tensor: StoredTensor, codes: StoredTensor, grid: tuple[int, ...]) -> StoredTensor:
    """Return scales or zeros, one for each block; where all matrices of a stack have the same, one for each matrix."""
    if tensor.spec.numel != math.prod(grid):
        raise LayoutError(
            tensor, f"is {list(tensor.shape)} for `{codes.name}` {list(codes.shape)}; expected {list(grid)}"
        )
    if len(grid) == MATRIX or grid[0] == codes.shape[0]:
        return tensor
    shape = (codes.shape[0], *grid[1:])
    return StoredTensor(
        spec=TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=shape), spans=tensor.spans * codes.shape[0]
    )


def _label(kind: str, tile: tuple[int, int], shape: tuple[int, ...]) -> str:
    return f"{kind} {in_tiles(tile, shape)}, torchao"


def _of_few_bits(weight: _Weight, said: Mapping[str, Any]) -> Encoding:
    """Return floats of four or eight bits whose scales are floats of eight."""
    codes, (group, label) = weight.codes, _FP4[weight.kind]
    if said.get("is_swizzled_scales"):
        raise LayoutError(
            codes, "has scales in the order of a GPU's kernel, which lora-tool does not read", is_fault=False
        )
    if said.get("block_size") != group:
        raise LayoutError(codes, f"has blocks of {said.get('block_size')}; lora-tool reads {group}", is_fault=False)
    eight = codes.dtype is DType.F8_E4M3
    if len(codes.shape) != MATRIX or not (eight or codes.dtype in (DType.U8, DType.F4)):
        raise LayoutError(codes, f"is {codes.dtype} {list(codes.shape)}, which lora-tool does not read", is_fault=False)
    rows, width = codes.shape[0], codes.nbytes // codes.shape[0] * (1 if eight else 2)
    scales = weight.needed("scale", (DType.F8_E4M3,) if weight.kind == "NVFP4Tensor" else POWERS, rows * width // group)
    if eight:
        label = f"mxfp8 in groups of {group}, torchao"
        return Tiled(spec=weight.spec(DType.F32, codes.shape), codes=codes, label=label, scales=scales, tile=(1, group))
    return Fp4(
        spec=weight.spec(DType.F32 if weight.kind == "NVFP4Tensor" else DType.BF16, (rows, width)),
        codes=codes,
        label=f"{label}, torchao",
        scales=scales,
        group=group,
        overall=weight.needed("per_tensor_scale", (DType.F32,), 1) if weight.has("per_tensor_scale") else None,
    )


_Reader: TypeAlias = Callable[[_Weight, Mapping[str, Any]], Encoding]
_READERS: Mapping[str, _Reader] = {
    "Float8Tensor": _tiled,
    "Int8Tensor": _tiled,
    "IntxUnpackedToInt8Tensor": _tiled,
    "MXTensor": _of_few_bits,
    "NVFP4Tensor": _of_few_bits,
}
