"""Small quantised weights as the libraries of their formats store them, and what those libraries make of them.

They are kept in `quantised_samples.safetensors`, so that the tests need none of the libraries. `python -m
tests.quantised_samples` makes the file again, with auto-round 0.16.1, bitsandbytes 0.50.2, compressed-tensors 0.20.0,
gptqmodel 7.7.0 (GPTQ and AWQ), nvidia-modelopt 0.47.0 and torchao 0.18.0 installed; `python -m tests.quantised_samples
NAME` the samples of one function alone: `auto_round`, or `in_order`, those in the order of activations, which
compressed-tensors knew until 0.13.0.
Every sample is called `NAME|TENSOR`; `NAME|expected` is the dequantised weight, and the file's metadata have `NAME|WEIGHT`
as torchao writes it for WEIGHT.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

_GROUP = 32
KEPT = Path(__file__).with_suffix(".safetensors")
ROUNDED = KEPT.with_name("rounded_samples.safetensors")
"""Plain weights, `KIND@TYPE-SHAPE|source`, and what bitsandbytes' four bits make of them, `…|expected`."""
Tensors = dict[str, Any]

_WEIGHTS: dict[str, dict[str, Any]] = {
    "int4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int4-group-asymmetric": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "int4-order": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int4-channel": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
    "int3-group": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int8-packed": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int8-asymmetric": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "fp8-block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [16, 32],
        "symmetric": True,
    },
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
}
"""compressed-tensors' arguments for the weights."""
_COLUMNS: dict[str, dict[str, Any]] = {
    "gptq-4": {"quant_method": "gptq", "bits": 4, "sym": True},
    "gptq-4-order": {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": True, "checkpoint_format": "gptq"},
    "gptq-4-asymmetric": {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq"},
    "gptq-2-asymmetric": {"quant_method": "gptq", "bits": 2, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "sym": False, "checkpoint_format": "gptq"},
    "awq-4": {"quant_method": "awq", "bits": 4, "version": "gemm"},
}
"""What the configs of GPTQ and AWQ say."""
_AUTO_ROUND: dict[str, dict[str, Any]] = {
    "auto-round-gptq": {"packing_format": "auto_round:auto_gptq", "bits": 4, "sym": True},
    "auto-round-gptq-8-asymmetric": {"packing_format": "auto_round:auto_gptq", "bits": 8, "sym": False},
    "auto-round-asymmetric": {"packing_format": "auto_round", "bits": 4, "sym": False},
    "auto-round-2-asymmetric": {"packing_format": "auto_round:gptqmodel", "bits": 2, "sym": False},
    "auto-round-awq": {"packing_format": "auto_round:auto_awq", "bits": 4, "sym": False},
    "auto-round-mxfp4": {"packing_format": "auto_round:llm_compressor", "bits": 4, "data_type": "mx_fp", "act_bits": 4},
    "auto-round-mxfp8": {"packing_format": "auto_round:llm_compressor", "bits": 8, "data_type": "mx_fp", "act_bits": 8},
    "auto-round-nvfp4": {"packing_format": "auto_round:llm_compressor", "bits": 4, "data_type": "nv_fp", "act_bits": 4},
}
"""What the configs of AutoRound say."""
for _said in _AUTO_ROUND.values():
    _said |= {"quant_method": "auto-round", "group_size": 16 if _said.get("data_type") == "nv_fp" else _GROUP}
_FORMATS = dict.fromkeys(("int8-channel", "int8-asymmetric"), "int-quantized")
_FORMATS |= {"fp8-channel": "float-quantized", "fp8-tensor": "float-quantized"}
_FORMATS |= {"fp8-block": "float-quantized", "nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


def config_of(name: str) -> dict[str, Any]:
    """Return the quantization_config that a model with this sample has."""
    if name.startswith("bnb"):
        return {"quant_method": "bitsandbytes", "load_in_8bit": name == "bnb-int8", "load_in_4bit": name != "bnb-int8"}
    if name in _COLUMNS.keys() | _AUTO_ROUND.keys():
        return {"group_size": _GROUP, **(_COLUMNS | _AUTO_ROUND)[name]}
    if name.startswith(("modelopt", "torchao-nvfp4")):
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if name.startswith("torchao-own"):
        return {"quant_method": "torchao"}
    if name.startswith("torchao"):
        return {"quant_method": "fp8", "weight_block_size": [16, 32]}
    weights = _WEIGHTS[name.partition("@")[0]]
    if name == "int4-order":
        weights = {**weights, "actorder": "group"}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def make() -> Tensors:
    """Return all samples, from the installed libraries."""
    import torch

    torch.manual_seed(7)
    found: Tensors = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kind in ("nf4", "fp4"):
            for nested in (False, True):
                for shape in ((12, 64), (6, 128)) if dtype is torch.bfloat16 else ((6, 128),):
                    found |= _bnb4(torch.randn(shape, dtype=dtype), kind, nested=nested)
    found |= _bnb4(torch.randn((300, 64), dtype=torch.bfloat16), "nf4", nested=True)
    found |= _bnb8(torch.randn((10, 48), dtype=torch.float16))
    for name in _WEIGHTS:
        if name in ("int4-order", "int8-asymmetric"):
            continue  # made elsewhere
        shape = (36, 80) if name == "fp8-block" else (20, 96)
        found |= _compressed(name, torch.randn(shape, dtype=torch.bfloat16))
    found |= _compressed("int4-group@float32", torch.randn((20, 96)))
    found |= _compressed("int4-group-asymmetric@float16", torch.randn((20, 96), dtype=torch.float16))
    return found | uneven() | columns_and_modelopt() | auto_round() | torchao() | torchao_own()[0]


def uneven() -> Tensors:
    """Return a weight of eight bits whose zero points are not 0."""
    import torch

    torch.manual_seed(15)
    return _compressed("int8-asymmetric", torch.randn((20, 96), dtype=torch.bfloat16) + 1)


def columns_and_modelopt() -> Tensors:
    """Return the samples of GPTQ, AWQ and modelopt."""
    import torch

    torch.manual_seed(11)
    found: Tensors = {}
    for name, said in _COLUMNS.items():
        weight = torch.randn((24, 3 * _GROUP))
        found |= _awq(name, weight) if said["quant_method"] == "awq" else _gptq(name, weight, said)
    for dtype in (torch.bfloat16, torch.float32):
        found |= _modelopt(f"modelopt-nvfp4@{str(dtype).removeprefix('torch.')}", torch.randn((12, 96), dtype=dtype))
    return found


def _gptq(name: str, weight: Any, said: dict[str, Any]) -> Tensors:
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, columns = weight.shape
    bits, top = said["bits"], 1 << said["bits"]
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = weight
    module = TorchLinear(
        bits=bits,
        group_size=_GROUP,
        sym=said["sym"],
        desc_act="desc_act" in said,
        in_features=columns,
        out_features=rows,
    )
    groups = torch.arange(columns, dtype=torch.int32) // _GROUP
    groups = groups[torch.randperm(columns)] if "desc_act" in said else groups
    # zeros of 0 are stored as -1, which borrows from the next in the word
    zeros = torch.full((rows, 3), top / 2) if said["sym"] else torch.randint(0, top, (rows, 3)).float()
    module.pack_original(linear, weight.abs().amax() / top * (1 + torch.rand(rows, 3)), zeros, groups)
    module.post_init()
    expected = module.dequantize_weight().T
    if said.get("checkpoint_format") != "gptq_v2":
        convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    parts = {key: getattr(module, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
    return {**{f"{name}|m.{key}": part.clone() for key, part in parts.items()}, f"{name}|expected": expected}


def _awq(name: str, weight: Any) -> Tensors:
    import torch
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    rows, columns = weight.shape
    codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (3, rows))
    scales = torch.rand((3, rows)).half()
    packed = pack_awq(codes, zeros, 4)
    expected = dequantize_gemm(*packed, scales, 4, _GROUP).T
    stored = dict(zip(("qweight", "qzeros", "scales"), (*packed, scales), strict=True))
    return {**{f"{name}|m.{key}": part for key, part in stored.items()}, f"{name}|expected": expected}


def auto_round() -> Tensors:
    """Return the samples of AutoRound, packed by its exporters, and what its layers compute of an identity."""
    import torch
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing

    torch.manual_seed(17)
    found: Tensors = {}
    for name, said in _AUTO_ROUND.items():
        if "data_type" in said:
            found |= _auto_round_floats(name, torch.randn((20, 3 * _GROUP), dtype=torch.bfloat16), config_of(name))
            continue
        linear, bits = torch.nn.Linear(3 * _GROUP, 64, bias=False), said["bits"]
        top = (1 << bits) - 1
        zeros = torch.full((64, 3), (top + 1) / 2) if said["sym"] else torch.randint(0, top + 1, (64, 3)).float()
        scales = linear.weight.detach().abs().amax() / top * (1 + torch.rand(64, 3))
        kind = dynamic_import_quant_linear_for_packing(said["packing_format"], bits, _GROUP, said["sym"])
        if "awq" in said["packing_format"]:
            module = kind.from_linear(linear, bits, _GROUP, scales=scales.T, zeros=zeros.T)
        else:
            module = kind(bits, _GROUP, 3 * _GROUP, 64, bias=False)
            module.device = "cpu"
            module.pack(linear, scales, int(zeros[0, 0]) if said["sym"] else zeros, None, device="cpu")
        parts = {key: part.clone() for key, part in module.state_dict().items()}
        expected = module(torch.eye(3 * _GROUP, dtype=torch.float16)).T.detach()
        found |= {**{f"{name}|m.{key}": part for key, part in parts.items()}, f"{name}|expected": expected}
    return found


def _auto_round_floats(name: str, weight: Any, said: dict[str, Any]) -> Tensors:
    import torch
    from auto_round.data_type import mxfp, nvfp
    from auto_round.experimental.qmodules import mx, nvfp4
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear
    from auto_round.schemes import QuantizationScheme

    bits, group = said["bits"], said["group_size"]
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    how = {"data_type": f"{said['data_type']}{bits}", "act_bits": said["act_bits"]}
    module = QuantLinear(bits, group, weight.shape[1], weight.shape[0], bias=False, **how)
    if said["data_type"] == "nv_fp":
        overall = nvfp.calculate_gparam(weight, group)
        _, scales, _ = nvfp.nv_fp4(weight, bits=4, group_size=group, global_scale=overall)
        module.pack(
            linear,
            scales.reshape(len(weight), -1),
            global_scale=overall,
            input_global_scale=torch.ones(1),
            device="cpu",
        )
        loaded = nvfp4.NVFP4QuantLinear
    else:
        _, scales, _ = mxfp.quant_mx(
            weight, bits=bits, group_size=group, data_type="mx_fp4e2m1" if bits == 4 else "mx_fp8e4m3"
        )
        module.pack(linear, scales.reshape(len(weight), -1), device="cpu")
        loaded = mx.MXFP4QuantLinear if bits == 4 else mx.MXFP8QuantLinear
    parts = {key: part.clone() for key, part in module.state_dict().items()}
    reader = loaded.from_original(QuantizationScheme.from_dict({**said, "act_group_size": group}), linear)
    reader.load_state_dict(parts, strict=False)
    expected = reader.dequant_weight_online().to(weight.dtype)
    return {**{f"{name}|m.{key}": part for key, part in parts.items()}, f"{name}|expected": expected}


def _modelopt(name: str, weight: Any) -> Tensors:
    import torch
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    made, scale, overall = NVFP4QTensor.quantize(weight.clone(), 16)
    how = {"scale": scale, "double_scale": overall, "block_sizes": {-1: 16}}
    stored = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": overall}
    expected = made.dequantize(torch.float32, **how).to(weight.dtype)
    return {**{f"{name}|m.{key}": part for key, part in stored.items()}, f"{name}|expected": expected}


def torchao() -> Tensors:
    """Return weights that torchao quantised, in the layouts of others: its own stores one tensor in pieces."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    torch.manual_seed(12)
    found: Tensors = {}
    for mode in ("FLOOR", "RCEIL", "EVEN"):
        for kind, end in (("float4_e2m1fn_x2", "_packed"), ("float8_e4m3fn", "")):
            made = MXTensor.to_mx(torch.randn((12, 96)), getattr(torch, kind), 32, ScaleCalculationMode[mode])
            name, scale = f"torchao-mxfp{4 if end else 8}-{mode.lower()}", made.scale.view(torch.uint8)
            stored = {f"weight{end}": made.qdata.view(torch.uint8) if end else made.qdata, "weight_scale": scale}
            found |= _as_sample(name, stored, made)
    weight = torch.randn((12, 96))
    overall = per_tensor_amax_to_scale(weight.abs().amax())
    made = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=overall)
    stored = {"weight": made.qdata.view(torch.uint8), "weight_scale": made.scale, "weight_scale_2": overall}
    found |= _as_sample("torchao-nvfp4", stored, made)
    for name, how in (("row", PerRow()), ("tensor", PerTensor()), ("tile", PerBlock([16, 32]))):
        made = Float8Tensor.from_hp(torch.randn((32, 96)), granularity=how)
        found |= _as_sample(f"torchao-fp8-{name}", {"weight": made.qdata, "weight_scale": made.scale}, made)
    made = Int8Tensor.from_hp(torch.randn((12, 96)), PerRow())
    return found | _as_sample("torchao-int8-row", {"weight": made.qdata, "weight_scale": made.scale}, made)


def torchao_own() -> tuple[Tensors, dict[str, str]]:
    """Return weights that torchao quantised and stored itself, and what it says of them in the metadata of a file."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8Tensor, IntxUnpackedToInt8Tensor, MappingType, PerBlock, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

    torch.manual_seed(13)
    plain = torch.randn((32, 96), dtype=torch.bfloat16)
    shifted, asymmetric = plain + 1, MappingType.ASYMMETRIC
    by_name = {"row": PerRow(), "tensor": PerTensor()}
    made = {
        **{f"fp8-{name}": Float8Tensor.from_hp(plain, granularity=how) for name, how in by_name.items()},
        "fp8-tiles": Float8Tensor.from_hp(plain, granularity=PerBlock([16, 32])),
        **{f"int8-{name}": Int8Tensor.from_hp(plain, how) for name, how in by_name.items()},
        "int8-asymmetric": Int8Tensor.from_hp(shifted, PerRow(), mapping_type=asymmetric),
        **{
            f"{kind}-unpacked": IntxUnpackedToInt8Tensor.from_hp(
                shifted, (1, 32), getattr(torch, kind), mapping_type=asymmetric
            )
            for kind in ("int2", "int4")
        },
        "mxfp8": MXTensor.to_mx(plain, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL),
        "mxfp4": MXTensor.to_mx(plain, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL),
        "nvfp4": NVFP4Tensor.to_nvfp4(plain),
        "nvfp4-overall": NVFP4Tensor.to_nvfp4(plain, per_tensor_scale=per_tensor_amax_to_scale(plain.abs().amax())),
    }
    found: Tensors = {}
    said: dict[str, str] = {}
    for kind, weight in made.items():
        name = f"torchao-own-{kind}"
        stored, metadata = flatten_tensor_state_dict({"m.weight": weight})
        found |= {f"{name}|{key}": part.contiguous() for key, part in stored.items()}
        found[f"{name}|expected"] = weight.dequantize()
        said[f"{name}|m.weight"] = metadata["m.weight"]
    return found, said


def _as_sample(name: str, stored: Tensors, made: Any) -> Tensors:
    return {**{f"{name}|m.{key}": part for key, part in stored.items()}, f"{name}|expected": made.dequantize()}


def _bnb4(weight: Any, kind: str, *, nested: bool) -> Tensors:
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    shape = "x".join(map(str, weight.shape))
    name = f"bnb-{kind}{'-double' if nested else ''}@{str(weight.dtype).removeprefix('torch.')}-{shape}"
    packed = {f"{name}|m.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
    return {f"{name}|m.weight": codes, **packed, f"{name}|expected": bnb.dequantize_4bit(codes, state)}


def make_rounded() -> Tensors:
    """Return plain weights and what is left of them after four bits, from the installed library."""
    import bitsandbytes.functional as bnb
    import torch

    torch.manual_seed(8)
    found: Tensors = {}
    for kind in ("nf4", "nf4-double", "fp4"):
        # torch adds a mean of float32 in an order of its own, which 16 bits do not show
        wide = (torch.bfloat16, (300, 64)) if "double" in kind else (torch.float32, (6, 128))
        for dtype, shape in ((torch.bfloat16, (12, 64)), (torch.float16, (10, 90)), wide):
            weight = torch.randn(shape, dtype=dtype)
            weight[1, :64] = 0
            codes, state = bnb.quantize_4bit(weight, quant_type=kind[:3], compress_statistics="double" in kind)
            name = f"{kind}@{str(dtype).removeprefix('torch.')}-{shape[0]}"
            values = bnb.dequantize_4bit(codes, state) + 0  # its kernels do not agree on the sign of zero
            found |= {f"{name}|source": weight, f"{name}|expected": values}
    return found


def _bnb8(weight: Any) -> Tensors:
    import bitsandbytes.functional as bnb

    codes, largest, _ = bnb.int8_vectorwise_quant(weight)
    return {
        "bnb-int8|m.weight": codes,
        "bnb-int8|m.SCB": largest,
        "bnb-int8|expected": bnb.int8_vectorwise_dequant(codes, largest),
    }


def _compressed(name: str, weight: Any) -> Tensors:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**_WEIGHTS[name.partition("@")[0]])
    state: Tensors = {"weight": weight}
    low, high = _extremes(weight, args)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (2688 / weight.abs().max()).to(torch.float32).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale if args.type == "float" and args.num_bits == 4 else scale.to(weight.dtype)
    if not args.symmetric:
        state["weight_zero_point"] = zero
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(_FORMATS.get(name, "pack-quantized"))
    packed = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(packed), scheme)["weight"]
    stored = {key: tensor for key, tensor in packed.items() if tensor is not None}
    return {**{f"{name}|m.{key}": tensor for key, tensor in stored.items()}, f"{name}|expected": expected}


def in_order() -> Tensors:
    """Return weights whose inputs are in groups by the order of their activations, from an older compressed-tensors."""
    import torch
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(14)
    args = QuantizationArgs(**_WEIGHTS["int4-order"])
    weight, groups = torch.randn((20, 96), dtype=torch.bfloat16), (torch.randperm(96) // _GROUP).to(torch.int32)
    sorted_by_group = weight[:, torch.argsort(groups, stable=True)]
    scale, zero = calculate_qparams(*_extremes(sorted_by_group, args), args)
    scale = scale.to(weight.dtype)
    compressor = PackedQuantizationCompressor()
    packed = compressor.compress_weight(weight, scale, args, zero_point=zero, g_idx=groups)
    packed |= {"weight_scale": scale, "weight_g_idx": groups}
    expected = compressor.decompress_weight(dict(packed), args)
    return {**{f"int4-order|m.{key}": tensor for key, tensor in packed.items()}, "int4-order|expected": expected}


def _extremes(weight: Any, args: Any) -> tuple[Any, Any]:
    """Return the least and the largest value of what has one scale."""
    rows, columns = weight.shape
    if args.strategy == "block":
        import torch

        down, across = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % across, 0, -rows % down))
        tiles = padded.reshape(-(-rows // down), down, -(-columns // across), across)
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    groups = weight.reshape(rows, -1, args.group_size or columns)
    return groups.amin(-1), groups.amax(-1)


if __name__ == "__main__":
    import sys

    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(KEPT, framework="pt") as file:
        said = file.metadata() or {}
    alone = next((each for each in (auto_round, in_order) if each.__name__ in sys.argv), None)
    if alone is not None:
        parts = {KEPT: load_file(KEPT) | alone()}
    else:
        said = torchao_own()[1]
        parts = {KEPT: load_file(KEPT) | make(), ROUNDED: make_rounded()}
    for path, made in parts.items():
        table = {name: tensor.detach().contiguous() for name, tensor in made.items()}
        save_file(table, path, said if path == KEPT else None)
