"""Which tensors of a checkpoint are quantised weights: told by their types and by the scales beside them.

Configs say how large a tile is; what is quantised is said by the files, for lists of modules name those on disk in one
repository and those in memory in another, and some layers are known to no class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lora_tool.formats.quantised.bitsandbytes import STATE, four_bits, int8
from lora_tool.formats.quantised.columns import columns
from lora_tool.formats.quantised.encodings import Encoding, Fp4, PackedIntegers, Tiled, parts
from lora_tool.formats.quantised.parts import LayoutError, Parts
from lora_tool.formats.stored import read_part
from lora_tool.tensors import DType, StoredTensor, TensorSpec, TensorTable

Shape = tuple[int, ...]
_Layout = Callable[[str, StoredTensor], Encoding]
_MATRIX, _STACK = 2, 3
_MX, _NV = 32, 16
_SCALES = (DType.F32, DType.BF16, DType.F16)
_POWERS = (DType.F8_E8M0, DType.U8)
_READ = (DType.F8_E4M3, DType.F8_E8M0)
_OF_CACHES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_CALIBRATED = (
    ".activation_scale",
    ".input_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".prob_output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
)
"""Ends of the names of what was measured on the quantised model, for inputs and caches: no part of a weight."""
_PARTS = (
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".SCB",
    "_blocks",
    "_scales",
    "_scale_inv",
    ".qscale_weight",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".qweight",
    ".qzeros",
    ".g_idx",
)
"""Ends of the names of what is a part of a quantised weight: without the others it is nothing."""
_SIGNS = (".SCB", ".weight_packed", ".qweight", "_proj_blocks")
"""Those of them that nothing else is called."""
_NARROW = frozenset(dtype for dtype in DType if dtype.value[:3] in ("F8_", "F6_", "F4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeights:
    """The quantised weights of a checkpoint, and what lies beside them."""

    weights: Mapping[str, Encoding]
    """Name of the matrix → its encoding, in the order of the file."""
    calibrated: tuple[str, ...]
    """Tensors that belong to the quantised model alone, and to no weight: scales of inputs and of caches."""


def read_quantised(tensors: TensorTable, table: Mapping[str, Any]) -> QuantisedWeights:
    """Return the quantised weights among `tensors`; `table` is the config's quantization table, empty without one.

    Reads headers, and a few bytes where a format keeps shapes as tensors. Raises `LayoutError`, OSError.
    """
    found = {each.spec.name: each for each in _Layouts(tensors, table).found()}
    used = {part.name for each in found.values() for part in parts(each)}
    calibrated = tuple(name for name in tensors if name not in used and name.endswith(_CALIBRATED))
    used.update(calibrated)
    lone = [tensor for name, tensor in tensors.items() if name not in used]
    for tensor in lone:
        if _is_narrow(tensor):
            if tensor.dtype in _READ:
                raise LayoutError(tensor, f"is {tensor.dtype}, but has no scale")
            raise LayoutError(
                tensor, f"is {tensor.dtype}, and lora-tool does not read codes of that dtype", is_fault=False
            )
    for tensor in lone:
        if tensor.name.endswith(_PARTS):
            raise LayoutError(tensor, "is a part of a quantised weight whose other parts are missing")
    return QuantisedWeights(weights=found, calibrated=calibrated)


def is_of_cache(name: str) -> bool:
    """Return whether a tensor scales what attention keeps of keys and values, by its name: weights have no part in it."""
    return name.endswith(_OF_CACHES)


def is_sign(tensor: StoredTensor) -> bool:
    """Return whether a tensor shows that a model is quantised, whatever its config says."""
    return _is_narrow(tensor) or STATE in tensor.name or tensor.name.endswith(_SIGNS)


def _is_narrow(tensor: StoredTensor) -> bool:
    """Return whether the elements are floats of eight bits or less."""
    return tensor.dtype in _NARROW


def _sizes(table: Mapping[str, Any]) -> tuple[frozenset[tuple[int, int]], frozenset[int]]:
    """Return the tiles and the numbers of bits that a config names."""
    groups = table.get("config_groups")
    listed = groups.values() if isinstance(groups, dict) else ()
    named = (group.get("weights") for group in listed if isinstance(group, dict))
    weights = [each for each in named if isinstance(each, dict)]
    tiles = [each.get("block_structure") for each in weights]
    if table.get("quant_method") == "fp8":
        tiles.append(table.get("weight_block_size", [128, 128]))
    pairs = (tuple(tile) for tile in tiles if isinstance(tile, list))
    bits = (each.get("num_bits") for each in weights)
    return (
        frozenset(pair for pair in pairs if len(pair) == _MATRIX and all(type(n) is int and n > 0 for n in pair)),
        frozenset(each for each in bits if type(each) is int and 0 < each <= 8),  # noqa: PLR2004 - codes of a byte
    )


class _Layouts(Parts):
    """The tensors of a checkpoint, asked for the quantised weights among them."""

    def __init__(self, tensors: TensorTable, table: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self._tiles, self._bits = _sizes(table)
        self._table = table
        self._known_tiles: dict[tuple[Shape, Shape, DType], tuple[int, int]] = {}

    def found(self) -> Iterator[Encoding]:
        """Yield every quantised weight. Raises `LayoutError`."""
        for name, tensor in self.tensors.items():
            how = self._how(name, tensor)
            if how is not None:
                yield how(name, tensor)

    def _how(self, name: str, tensor: StoredTensor) -> _Layout | None:
        """Return what reads the weight of which the tensor is the sign; None for what is no sign of one."""
        if STATE in name:
            return partial(four_bits, self)
        if tensor.dtype is DType.I8 and self._scales_of_halves(name, tensor):
            return self._fp4_of_integers
        of_integers = tensor.dtype is DType.I8 and f"{name}_scale" in self.tensors
        of_floats = tensor.dtype is DType.F8_E4M3 and not name.endswith(("_scale", "_scales", "_scale_inv", ".scale"))
        if of_integers or of_floats:
            return self._tiled
        return self._by_end(name, tensor)

    def _by_end(self, name: str, tensor: StoredTensor) -> _Layout | None:
        """Return what reads the weight of which the tensor is the sign by the end of its name."""
        if tensor.dtype is DType.U8 and name.endswith("_blocks"):
            return self._gpt_oss
        if tensor.dtype is DType.U8 and name.endswith(".weight") and f"{name}_scale_2" in self.tensors:
            return self._fp4_modelopt
        if name.endswith(".weight_packed"):
            return self._packed if tensor.dtype is DType.I32 else self._fp4_packed
        if name.endswith(".qweight"):
            return partial(columns, self, self._table)
        return partial(int8, self) if name.endswith(".SCB") else None

    def _tiled(self, name: str, codes: StoredTensor) -> Encoding:
        module = name.removesuffix(".weight")
        names = [f"{name}_scale_inv", f"{name}_scale"]
        names += [f"{module}.scale", f"{module}.qscale_weight"] if module != name else []
        scales = next((self.tensors[each] for each in names if each in self.tensors), None)
        if scales is None:
            raise LayoutError(codes, f"is {codes.dtype}, but has no scale `{names[0]}`")
        if f"{name}_zero_point" in self.tensors:
            raise LayoutError(
                codes,
                f"has `{name}_zero_point`: lora-tool does not read codes of 8 bits with a zero point",
                is_fault=False,
            )
        if scales.dtype not in (*_SCALES, *_POWERS):
            raise LayoutError(scales, f"is {scales.dtype}; expected floats or powers of two (E8M0)")
        form = codes.shape, scales.shape, scales.dtype  # of which a model with many thousand weights has a dozen
        if form not in self._known_tiles:
            self._known_tiles[form] = self._tile(codes, scales)
        tile = self._known_tiles[form]
        kind = "int8" if codes.dtype is DType.I8 else "fp8 e4m3"
        height, width = codes.shape[-2:]
        whole = {(height, width): "per tensor", (1, width): "per row"}.get(tile, f"in tiles of {tile[0]}x{tile[1]}")
        return Tiled(
            spec=TensorSpec(name=name, dtype=DType.F32, shape=codes.shape),
            codes=codes,
            label=f"{kind} {whole}",
            scales=scales,
            tile=tile,
        )

    def _tile(self, codes: StoredTensor, scales: StoredTensor) -> tuple[int, int]:
        """Return the rows and columns of a tile: as the config says where the grid is that, else a row or all."""
        if not _MATRIX <= len(codes.shape) <= _STACK or 0 in codes.shape:
            raise LayoutError(
                codes,
                f"is {list(codes.shape)}; expected a matrix or a stack of them",
                is_fault=False,
            )
        *lead, rows, columns = codes.shape
        tiles = self._tiles | ({(1, _MX)} if scales.dtype in _POWERS else frozenset())
        grids = {(*lead, -(-rows // down), -(-columns // across)): (down, across) for down, across in sorted(tiles)}
        others: dict[Shape, tuple[int, int]] = {
            (*lead, 1, 1): (rows, columns),
            tuple(lead): (rows, columns),
            (*lead, rows, 1): (1, columns),
            (*lead, rows): (1, columns),
            (*lead, 1, columns): (rows, 1),
        }
        if math.prod(lead) == 1:
            others |= {(): (rows, columns), (1,): (rows, columns)}
        found = grids.get(scales.shape) or others.get(scales.shape)
        if found is None:
            expected = " or ".join(str(list(grid)) for grid in grids) or f"one scale, or one for each of {rows} rows"
            raise LayoutError(
                scales, f"is {list(scales.shape)} for `{codes.name}` {list(codes.shape)}; expected {expected}"
            )
        return found

    def _packed(self, name: str, codes: StoredTensor) -> Encoding:
        weight = name.removesuffix("_packed")
        if f"{weight}_g_idx" in self.tensors:
            raise LayoutError(
                codes,
                f"has `{weight}_g_idx`: lora-tool does not read weights in the order of their activations",
                is_fault=False,
            )
        said = self.needed(f"{weight}_shape", codes, (DType.I64, DType.I32), _MATRIX)
        shape = _integers(said)
        fitting = [bits for bits in self._bits if codes.shape == (shape[0], -(-shape[1] * bits // 32))]
        if len(fitting) != 1 or min(shape) < 1:
            raise LayoutError(
                codes,
                f"is {list(codes.shape)} for a weight of {list(shape)}; the config names "
                f"{', '.join(map(str, sorted(self._bits))) or 'no'} bits",
            )
        (bits,) = fitting
        scales = self.needed(f"{weight}_scale", codes, _SCALES)
        groups = 1 if math.prod(scales.shape) == 1 or scales.shape == shape[:1] else scales.shape[-1]
        if scales.shape not in {(), (1,), shape[:1], (1, 1), (shape[0], groups)} or shape[1] % groups:
            raise LayoutError(scales, f"is {list(scales.shape)} for a weight of {list(shape)}")
        zeros = self.tensors.get(f"{weight}_zero_point")
        allowed = {DType.I8: (shape[0], groups), DType.I32: (-(-shape[0] * bits // 32), groups)}
        if zeros is not None and allowed.get(zeros.dtype) != zeros.shape:
            raise LayoutError(zeros, f"is {zeros.dtype} {list(zeros.shape)} for {list(shape)}")
        return PackedIntegers(
            spec=TensorSpec(name=weight, dtype=scales.dtype, shape=shape),
            codes=codes,
            label=f"int{bits} in groups of {shape[1] // groups}",
            scales=scales,
            zeros=zeros,
            bits=bits,
            group=shape[1] // groups,
            record=said,
        )

    def _fp4_packed(self, name: str, codes: StoredTensor) -> Encoding:
        weight = name.removesuffix("_packed")
        overall = self.tensors.get(f"{weight}_global_scale")
        kind = (DType.F8_E4M3,) if overall is not None else _POWERS
        return self._fp4(weight, self._of_bytes(codes), f"{weight}_scale", kind, DType.BF16, overall, divides=True)

    def _fp4_modelopt(self, name: str, codes: StoredTensor) -> Encoding:
        overall = self.tensors[f"{name}_scale_2"]
        return self._fp4(name, codes, f"{name}_scale", (DType.F8_E4M3,), DType.F32, overall, divides=False)

    def _scales_of_halves(self, name: str, codes: StoredTensor) -> str | None:
        """Return the powers of two that are scales where a byte is two values, one for each 32 of a row: DeepSeek-V4's."""
        shape = (*codes.shape[:-1], 2 * codes.shape[-1] // _MX) if len(codes.shape) == _MATRIX else ()
        for each in (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"):
            scales = self.tensors.get(each)
            if scales is not None and scales.dtype in _POWERS and scales.shape == shape:
                return each
        return None

    def _fp4_of_integers(self, name: str, codes: StoredTensor) -> Encoding:
        scales = self._scales_of_halves(name, codes) or ""
        return self._fp4(name, codes, scales, _POWERS, DType.BF16, None, divides=False)

    @staticmethod
    def _of_bytes(codes: StoredTensor) -> StoredTensor:
        if codes.dtype is not DType.U8:
            raise LayoutError(codes, f"is {codes.dtype}; expected I32 or U8")
        return codes

    def _fp4(
        self,
        name: str,
        codes: StoredTensor,
        scale: str,
        kinds: tuple[DType, ...],
        dtype: DType,
        overall: StoredTensor | None,
        *,
        divides: bool,
    ) -> Encoding:
        scales = self.needed(scale, codes, kinds)
        group = _NV if overall is not None else _MX
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
        if len(shape) != _MATRIX or scales.shape != (shape[0], shape[1] // group) or shape[1] % group:
            raise LayoutError(
                scales,
                f"is {list(scales.shape)} for `{codes.name}` {list(codes.shape)}; expected one "
                f"scale for each {group} values of a row",
            )
        if overall is not None:
            self.needed(overall.name, codes, (DType.F32,), 1)
        return Fp4(
            spec=TensorSpec(name=name, dtype=dtype, shape=shape),
            codes=codes,
            label="nvfp4" if overall is not None else "mxfp4",
            scales=scales,
            group=group,
            overall=overall,
            divides=divides,
        )

    def _gpt_oss(self, name: str, codes: StoredTensor) -> Encoding:
        weight = name.removesuffix("_blocks")
        scales = self.needed(f"{weight}_scales", codes, _POWERS)
        if len(codes.shape) != 4 or codes.shape != (*scales.shape, _MX // 2):  # noqa: PLR2004 - experts, rows, groups, bytes
            raise LayoutError(
                codes,
                f"is {list(codes.shape)} with scales of {list(scales.shape)}; expected "
                "[experts, rows, groups, 16] and [experts, rows, groups]",
            )
        experts, rows, groups = scales.shape
        return Fp4(
            spec=TensorSpec(name=weight, dtype=DType.BF16, shape=(experts, groups * _MX, rows)),
            codes=codes,
            label="mxfp4",
            scales=scales,
            group=_MX,
            transposed=True,
        )


def _integers(tensor: StoredTensor) -> Shape:
    data, size = read_part(tensor, 0, tensor.nbytes), tensor.dtype.bits // 8
    return tuple(int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size))
