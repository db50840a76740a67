"""Small quantised weights as the libraries of their formats store them, and what those libraries make of them.

They are kept in `quantised_samples.safetensors`, so that the tests need none of the libraries. `python -m
tests.quantised_samples` makes the file again, with bitsandbytes 0.50.2 and compressed-tensors 0.20.0 installed.
Every sample is called `NAME|TENSOR`; `NAME|expected` is the dequantised weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_suffix(".safetensors")
ROUNDED = KEPT.with_name("rounded_samples.safetensors")
"""Plain weights, `KIND@TYPE-SHAPE|source`, and what bitsandbytes' four bits make of them, `…|expected`."""
Tensors = dict[str, Any]

_WEIGHTS: dict[str, dict[str, Any]] = {
    "int4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int4-group-asymmetric": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
    "int4-channel": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
    "int3-group": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int8-packed": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
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
_FORMATS = {"int8-channel": "int-quantized", "fp8-channel": "float-quantized", "fp8-tensor": "float-quantized"}
_FORMATS |= {"fp8-block": "float-quantized", "nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}


def config_of(name: str) -> dict[str, Any]:
    """Return the quantization_config that a model with this sample has."""
    if name.startswith("bnb"):
        return {"quant_method": "bitsandbytes", "load_in_8bit": name == "bnb-int8", "load_in_4bit": name != "bnb-int8"}
    weights = _WEIGHTS[name.partition("@")[0]]
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
        shape = (36, 80) if name == "fp8-block" else (20, 96)
        found |= _compressed(name, torch.randn(shape, dtype=torch.bfloat16))
    found |= _compressed("int4-group@float32", torch.randn((20, 96)))
    return found | _compressed("int4-group-asymmetric@float16", torch.randn((20, 96), dtype=torch.float16))


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
    from safetensors.torch import save_file

    for path, made in ((KEPT, make()), (ROUNDED, make_rounded())):
        save_file({name: tensor.detach().contiguous() for name, tensor in made.items()}, path)
