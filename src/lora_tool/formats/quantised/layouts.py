"""Which tensors of a checkpoint are quantised weights: recognised by their dtypes and their scales.

Configs only give the size of a tile. Their lists of quantised modules are not used: some repositories list the names
on disk, others those in memory, and some layers belong to no class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec, TensorTable
from lora_tool.formats.quantised.auto_round import in_known_words, not_read
from lora_tool.formats.quantised.bitsandbytes import STATE, four_bits, int8
from lora_tool.formats.quantised.columns import columns, packed
from lora_tool.formats.quantised.encodings import Encoding, Fp4, OffsetIntegers, Tiled, parts
from lora_tool.formats.quantised.names import always, least_bits, sizes
from lora_tool.formats.quantised.parts import MATRIX, POWERS, SCALES, STACK, LayoutError, Parts, in_tiles
from lora_tool.formats.quantised.torchao import CODES, torchao, weight_of

_Shape = tuple[int, ...]
_Layout = Callable[[str, StoredTensor], Encoding]
_MX, _NV = 32, 16
_OF_SIX_BITS = _MX * 6 // 8
"""Bytes of 32 codes of MXFP6."""
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
    "_proj_activation_scale",
    "_proj_input_scale",
    "_act_quant_scale",
    "_act_quant_zero_point",
    "_act_per_tensor_scale",
)
"""Ends of the names of scales measured on the quantised model, for inputs and caches: not part of a weight. A stack of
experts is a parameter, and its scales are named after it."""
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
    "_proj_weight_scale",
    "_proj_weight_scale_2",
    ".weight_global_scale",
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".qweight",
    ".qzeros",
    ".g_idx",
    "._weight_scale",
    "._weight_zero_point",
)
"""Ends of the names of a quantised weight's parts, which are useless without each other."""
_EXTRAS = {
    "pre_quant_scale": "scales its layer's input: lora-tool does not read modelopt's AWQ",
    "_act_pre_scale": "scales its layer's input, which lora-tool does not read",
    ".bitmask": "is the mask of a sparse weight, which lora-tool does not read",
}
"""Ends of the names of extra tensors, with neither codes nor scales, and why their weight is not read."""
_SIGNS = (".SCB", ".weight_packed", ".qweight", "_proj_blocks", f"._weight{CODES}")
"""Those of them that nothing else is called."""
_NO_METADATA: Mapping[str, str] = MappingProxyType({})
_NARROW = frozenset(dtype for dtype in DType if dtype.value[:3] in ("F8_", "F6_", "F4"))


class QuantisedWeights(Struct, frozen=True, kw_only=True):
    """The quantised weights of a checkpoint, and the calibrated scales."""

    weights: Mapping[str, Encoding]
    """Name of the matrix → its encoding, in the order of the file."""
    calibrated: tuple[str, ...]
    """Tensors that only the quantised model has, and that belong to no weight: scales of inputs and of caches."""


def read_quantised(
    tensors: TensorTable, table: Mapping[str, Any], metadata: Mapping[str, str] = _NO_METADATA
) -> QuantisedWeights:
    """Return the quantised weights among `tensors`; `table` is the config's quantization table, empty without one.

    `metadata` are the texts in the headers of the files, where torchao says what its weights are.

    Reads headers, and a few bytes where a format keeps shapes as tensors. Raises `LayoutError`, OSError.
    """
    _require_whole(tensors, table)
    table = in_known_words(table)
    found = {each.spec.name: each for each in _Layouts(tensors, table, metadata).found()}
    used = {part.name for each in found.values() for part in parts(each)}
    calibrated = tuple(name for name in tensors if name not in used and name.endswith(_CALIBRATED))
    used.update(calibrated)
    lone = [tensor for name, tensor in tensors.items() if name not in used]
    for tensor in lone:
        if _is_narrow(tensor) or _is_integer_weight(tensor):
            if tensor.dtype in (*_READ, DType.I8):
                raise LayoutError(tensor, f"is {tensor.dtype}, but has no scale")
            raise LayoutError(
                tensor, f"is {tensor.dtype}, and lora-tool does not read codes of that dtype", is_fault=False
            )
    for tensor in lone:
        if tensor.name.endswith(_PARTS):
            raise LayoutError(tensor, "is a part of a quantised weight whose other parts are missing")
    return QuantisedWeights(weights=found, calibrated=calibrated)


def _require_whole(tensors: TensorTable, table: Mapping[str, Any]) -> None:
    """Raise `LayoutError` where codes and scales do not suffice: inputs are transformed, or weights sparse."""
    extra = next((each for name, each in tensors.items() if name.endswith(tuple(_EXTRAS))), None)
    if extra is not None:
        why = next(why for end, why in _EXTRAS.items() if extra.name.endswith(end))
        raise LayoutError(extra, why, is_fault=False)
    otherwise = not_read(table)
    transforms = table.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        otherwise = (
            "is in a model whose layers transform their inputs (`transform_config`), which lora-tool does not read"
        )
    if tensors and otherwise is not None:
        first = next(filter(is_sign, tensors.values()), next(iter(tensors.values())))
        raise LayoutError(first, otherwise, is_fault=False)


def measured_for(name: str) -> str:
    """Return the module, or the stack of experts, for which a scale of inputs was measured, by the scale's name."""
    above, _, leaf = name.rpartition(".")
    stack = next((leaf.removesuffix(end) for end in ("_activation_scale", "_input_scale") if leaf.endswith(end)), None)
    return f"{above}.{stack}" if stack else above


def is_of_cache(name: str) -> bool:
    """Return whether a tensor scales attention's cache of keys and values, by its name: it belongs to no weight."""
    return name.endswith(_OF_CACHES)


def is_sign(tensor: StoredTensor) -> bool:
    """Return whether a tensor shows that a model is quantised, whatever its config says."""
    return _is_narrow(tensor) or _is_integer_weight(tensor) or STATE in tensor.name or tensor.name.endswith(_SIGNS)


def _is_integer_weight(tensor: StoredTensor) -> bool:
    """Return whether a matrix is called as a layer's weight, but holds integers of eight bits: without scales it is nothing."""
    return tensor.dtype is DType.I8 and len(tensor.shape) == MATRIX and tensor.name.endswith(".weight")


def _is_narrow(tensor: StoredTensor) -> bool:
    """Return whether the elements are floats of eight bits or less."""
    return tensor.dtype in _NARROW


class _Layouts(Parts):
    """Finds the quantised weights among the tensors of a checkpoint."""

    def __init__(self, tensors: TensorTable, table: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self._metadata = metadata
        self._tiles, self._bits = sizes(table)
        self._always = always(table)
        self._table = table
        self._known_tiles: dict[tuple[_Shape, _Shape, DType], tuple[int, int]] = {}

    def found(self) -> Iterator[Encoding]:
        """Yield every quantised weight. Raises `LayoutError`."""
        for name, tensor in self.tensors.items():
            how = self._how(name, tensor)
            if how is not None:
                yield how(name, tensor)

    def _how(self, name: str, tensor: StoredTensor) -> _Layout | None:
        """Return the reader of the quantised weight that the tensor shows; None for a tensor that shows none."""
        if STATE in name:
            return partial(four_bits, self)
        if name.endswith(CODES) and weight_of(name) is not None:
            return partial(torchao, self, self._metadata)
        if tensor.dtype in (DType.I8, DType.U8) and self._scales_of_halves(name, tensor):
            return self._fp4_of_integers
        of_integers = tensor.dtype is DType.I8 and f"{name}_scale" in self.tensors
        of_floats = tensor.dtype is DType.F8_E4M3 and not name.endswith(("_scale", "_scales", "_scale_inv", ".scale"))
        if of_integers or of_floats:
            return self._tiled
        return self._by_end(name, tensor)

    def _by_end(self, name: str, tensor: StoredTensor) -> _Layout | None:
        """Return the reader of the quantised weight that the end of the tensor's name shows."""
        if tensor.dtype is DType.U8 and name.endswith("_blocks"):
            return self._gpt_oss
        if tensor.dtype is DType.U8 and name.endswith(".weight") and f"{name}_scale" in self.tensors:
            return self._fp4_modelopt
        if tensor.dtype is DType.U8 and f"{name}_weight_scale_2" in self.tensors:
            return self._fp4_of_stack
        if name.endswith(".weight_packed"):
            return partial(packed, self, self._bits, self._always) if tensor.dtype is DType.I32 else self._fp4_packed
        if name.endswith(".qweight"):
            return partial(columns, self, self._table)
        return partial(int8, self) if name.endswith(".SCB") else None

    def _tiled(self, name: str, codes: StoredTensor) -> Encoding:
        module = name.removesuffix(".weight")
        names = [f"{name}_scale_inv", f"{name}_scale"]
        names += [f"{module}.scale", f"{module}.qscale_weight"] if module != name else [f"{name}_weight_scale"]
        scales = next((self.tensors[each] for each in names if each in self.tensors), None)
        if scales is None:
            raise LayoutError(codes, f"is {codes.dtype}, but has no scale `{names[0]}`")
        zeros = self.tensors.get(f"{name}_zero_point")
        if zeros is None and codes.dtype is DType.I8 and "_zero_point" in self._always:
            raise LayoutError(codes, f"has no `{name}_zero_point`, but the config says that its codes have zero points")
        if scales.dtype not in (*SCALES, *POWERS):
            raise LayoutError(scales, f"is {scales.dtype}; expected floats or powers of two (E8M0)")
        if math.prod(scales.shape) == 1 < math.prod(codes.shape[:-2]):
            scales = _one_for_each(scales, math.prod(codes.shape[:-2]))
        form = codes.shape, scales.shape, scales.dtype  # cached: many thousand weights have a dozen of these
        if form not in self._known_tiles:
            self._known_tiles[form] = self._tile(codes, scales)
        tile = self._known_tiles[form]
        bits = least_bits(self._table) if codes.dtype is DType.I8 else 8
        kind = f"int{bits}" if codes.dtype is DType.I8 else "fp8 e4m3"
        spec = TensorSpec(name=name, dtype=DType.F32, shape=codes.shape)
        label = f"{kind} {in_tiles(tile, codes.shape)}"
        if zeros is None:
            return Tiled(spec=spec, codes=codes, label=label, scales=scales, tile=tile, bits=bits)
        if (codes.dtype, zeros.dtype, zeros.shape) != (DType.I8, DType.I8, scales.shape):
            raise LayoutError(
                zeros,
                f"is {zeros.dtype} {list(zeros.shape)} for codes of {codes.dtype} with scales of {list(scales.shape)}",
            )
        return OffsetIntegers(spec=spec, codes=codes, label=label, scales=scales, zeros=zeros, tile=tile, bits=bits)

    def _tile(self, codes: StoredTensor, scales: StoredTensor) -> tuple[int, int]:
        """Return the rows and columns of a tile: as the config says where the grid is that, else a row or all."""
        if not MATRIX <= len(codes.shape) <= STACK or 0 in codes.shape:
            raise LayoutError(
                codes,
                f"is {list(codes.shape)}; expected a matrix or a stack of them",
                is_fault=False,
            )
        *lead, rows, columns = codes.shape
        tiles = self._tiles | ({(1, _MX)} if scales.dtype in POWERS else frozenset())
        grids = {(*lead, -(-rows // down), -(-columns // across)): (down, across) for down, across in sorted(tiles)}
        others: dict[_Shape, tuple[int, int]] = {
            (*lead, 1, 1): (rows, columns),
            tuple(lead): (rows, columns),
            (*lead, rows, 1): (1, columns),
            (*lead, rows): (1, columns),
            (*lead, 1, columns): (rows, 1),
        }
        if math.prod(lead) == 1:
            others |= {(): (rows, columns), (1,): (rows, columns)}
        if (
            lead and self._table.get("quant_method") == "fbgemm_fp8"
        ):  # stacks are stored transposed, with a scale per output
            others[(*lead, columns, 1)] = (rows, 1)
        grid = scales.shape[::2] if scales.shape[1::2] == (1, 1) else scales.shape  # [down, 1, across, 1], modelopt's
        found = grids.get(grid) or others.get(grid)
        if found is None:
            expected = " or ".join(str(list(grid)) for grid in grids) or f"one scale, or one for each of {rows} rows"
            raise LayoutError(
                scales, f"is {list(scales.shape)} for `{codes.name}` {list(codes.shape)}; expected {expected}"
            )
        return found

    def _fp4_packed(self, name: str, codes: StoredTensor) -> Encoding:
        weight = name.removesuffix("_packed")
        overall = self.tensors.get(f"{weight}_global_scale")
        kind = (DType.F8_E4M3,) if overall is not None else POWERS
        return self._fp4(weight, self._of_bytes(codes), f"{weight}_scale", kind, DType.BF16, overall, divides=True)

    def _fp4_modelopt(self, name: str, codes: StoredTensor) -> Encoding:
        scales = self.tensors[f"{name}_scale"]
        if scales.dtype in SCALES:  # of AWQ, in four bits
            raise LayoutError(
                codes,
                f"has codes of {codes.dtype} with scales of {scales.dtype}, which lora-tool does not read",
                is_fault=False,
            )
        overall = self.needed(f"{name}_scale_2", codes, (DType.F32,), 1)
        return self._fp4(name, codes, f"{name}_scale", (DType.F8_E4M3,), DType.F32, overall, divides=False)

    def _fp4_of_stack(self, name: str, codes: StoredTensor) -> Encoding:
        """Return a stack of matrices [in, out] as modelopt stores it: quantised along the inputs, here the rows."""
        scales = self.needed(f"{name}_weight_scale", codes, (DType.F8_E4M3,))
        overall = self.needed(f"{name}_weight_scale_2", codes, (DType.F32,), 1)
        lead, shape = codes.shape[:-2], codes.shape[-2:]
        if len(codes.shape) != STACK or scales.shape != (*lead, 2 * shape[0] // _NV, shape[1]) or 2 * shape[0] % _NV:
            raise LayoutError(
                scales,
                f"is {list(scales.shape)} for `{codes.name}` {list(codes.shape)}; expected one scale for each {_NV} inputs",
            )
        return Fp4(
            spec=TensorSpec(name=name, dtype=DType.F32, shape=(*lead, 2 * shape[0], shape[1])),
            codes=codes,
            label="nvfp4",
            scales=scales,
            group=_NV,
            overall=overall,
            below=True,
        )

    def _scales_of_halves(self, name: str, codes: StoredTensor) -> str | None:
        """Return the powers of two that are scales where a byte is two values, one for each 32 of a row: DeepSeek-V4's."""
        shape = (*codes.shape[:-1], 2 * codes.shape[-1] // _MX) if len(codes.shape) == MATRIX else ()
        for each in (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"):
            scales = self.tensors.get(each)
            if scales is not None and scales.dtype in POWERS and scales.shape == shape:
                return each
        return None

    def _fp4_of_integers(self, name: str, codes: StoredTensor) -> Encoding:
        scales = self._scales_of_halves(name, codes) or ""
        return self._fp4(name, codes, scales, POWERS, DType.BF16, None, divides=False)

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
        if len(codes.shape) == MATRIX and scales.shape == (codes.shape[0], codes.shape[1] // _OF_SIX_BITS):
            raise LayoutError(codes, "holds floats of six bits (mxfp6), which lora-tool does not read", is_fault=False)
        group = _NV if overall is not None else _MX
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
        if len(shape) != MATRIX or scales.shape != (shape[0], shape[1] // group) or shape[1] % group:
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
        scales = self.needed(f"{weight}_scales", codes, POWERS)
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


def _one_for_each(scale: StoredTensor, count: int) -> StoredTensor:
    """Return a scale that a whole stack of matrices has as that of each of them."""
    spec = TensorSpec(name=scale.name, dtype=scale.dtype, shape=(count,))
    return StoredTensor(spec=spec, spans=scale.spans * count)
