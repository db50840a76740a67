"""Plain models made quantised, with arithmetic as short as it can be: the layouts of real checkpoints, in miniature.

Each form writes what its library writes beside a weight, and returns the numbers that the codes stand for, as torch
computes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Table = dict[str, torch.Tensor]
Made = tuple[Table, torch.Tensor]
"""The tensors of one module, and its weight as numbers."""
Form = tuple[Callable[..., Made], dict[str, Any]]
"""What makes a weight of this form, and what the config says of it."""

_NF4 = torch.tensor(
    [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ]
)  # fmt: skip
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TILE = 16
"""Rows and columns of a tile of the models here."""


def _tiles(weight: torch.Tensor, down: int, across: int) -> torch.Tensor:
    """Return the largest value of each tile, the last ones cut off, spread over the matrix again."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % across, 0, -rows % down))
    return padded.reshape(-(-rows // down), down, -(-columns // across), across).abs().amax((1, 3))


def _spread(scales: torch.Tensor, down: int, across: int, shape: torch.Size) -> torch.Tensor:
    return scales.float().repeat_interleave(down, 0).repeat_interleave(across, 1)[: shape[0], : shape[1]]


def _fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def _nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(-1).sub(levels).abs().argmin(-1).to(torch.uint8)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of four bits, the eight of the last axis in one word."""
    return torch.as_tensor(sum(codes.to(torch.int64)[..., at] << (4 * at) for at in range(8))).to(torch.int32)


def fp8_block(name: str, weight: torch.Tensor, scale: torch.dtype = torch.float32) -> Made:
    scales = _tiles(weight, TILE, TILE) / 448
    stored = (scales.log2().ceil().exp2() if scale is torch.float8_e8m0fnu else scales).to(scale)
    wide = _spread(stored, TILE, TILE, weight.shape)
    codes = _fp8(weight, wide)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": stored}, codes.float() * wide


def fp8_channel(name: str, weight: torch.Tensor) -> Made:
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = _fp8(weight, scales.float())
    beside = {f"{name}.input_scale": torch.ones(1)}
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales, **beside}, codes.float() * scales.float()


def fp8_tensor(name: str, weight: torch.Tensor) -> Made:
    scale = (weight.float().abs().amax() / 448).reshape(1)
    codes = _fp8(weight, scale)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale}, codes.float() * scale


def int4(name: str, weight: torch.Tensor) -> Made:
    scales = (_tiles(weight, 1, 32) / 7).to(torch.bfloat16)
    codes = (weight.float() / _spread(scales, 1, 32, weight.shape)).round().clamp(-8, 7)
    return {
        f"{name}.weight_packed": _words((codes + 8).reshape(len(codes), -1, 8)),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(weight.shape),
    }, (codes * _spread(scales, 1, 32, weight.shape)).to(torch.bfloat16).float()


def int8(name: str, weight: torch.Tensor, group: int = 0, *, packed: bool = False, offset: bool = False) -> Made:
    """Return codes with a scale for each `group` of a row, for each row (0) or for all (-1), and with zero points.

    Words of zero points are of rows below each other; one of all is no word.
    """
    rows, columns = (1, weight.numel()) if group < 0 else weight.shape
    groups = weight.float().reshape(rows, -1, max(group, 0) or columns)
    high, low = groups.amax(2).clamp(min=0), groups.amin(2).clamp(max=0)
    scales = ((high - low if offset else 2 * groups.abs().amax(2)) / 255).to(torch.bfloat16)
    zeros = (-128 - low / scales.float()).round().clamp(-128, 127) if offset else torch.zeros(scales.shape)
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(-128, 127)
    values = ((codes - zeros[..., None]) * scales.float()[..., None]).reshape(weight.shape)
    codes = codes.reshape(weight.shape)
    tensors = {f"{name}.weight_scale": scales.reshape(1) if group < 0 else scales}
    if packed:
        tensors[f"{name}.weight_packed"] = (codes + 128).to(torch.uint8).view(torch.int32)
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    else:
        tensors[f"{name}.weight"] = codes.to(torch.int8)
    if offset and packed and group > 0:
        words = (zeros + 128).to(torch.uint8).T.contiguous().view(torch.int32).T
        tensors[f"{name}.weight_zero_point"] = words
    elif offset:
        tensors[f"{name}.weight_zero_point"] = (zeros.reshape(1) if group < 0 else zeros).to(torch.int8)
    return tensors, values


def nvfp4(name: str, weight: torch.Tensor) -> Made:
    overall = 2688 / weight.float().abs().max()
    scales = (_tiles(weight, 1, 16) / 6 * overall).to(torch.float8_e4m3fn)
    wide = _spread(scales.float() / overall, 1, 16, weight.shape)
    codes = _nearest(weight.float() / wide, _E2M1)
    return {
        f"{name}.weight_packed": _halves(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_global_scale": overall.reshape(1),
    }, (_E2M1[codes.long()] * wide).to(torch.bfloat16).float()


def fp4(name: str, weight: torch.Tensor) -> Made:
    """Return what DeepSeek-V4's experts are: floats of four bits, two in a byte that is called an integer."""
    powers = _tiles(weight, 1, 32).clamp(min=2.0**-100).log2().floor() - 2
    wide = _spread(powers.exp2(), 1, 32, weight.shape)
    codes = _nearest(weight.float() / wide, _E2M1)
    scales = powers.exp2().to(torch.float8_e8m0fnu)
    return {f"{name}.weight": _halves(codes).view(torch.int8), f"{name}.scale": scales}, _E2M1[codes.long()] * wide


def bnb_int8(name: str, weight: torch.Tensor) -> Made:
    largest = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {
        f"{name}.weight": codes,
        f"{name}.SCB": largest,
        f"{name}.weight_format": torch.tensor(0).to(torch.uint8),
    }
    return tensors, codes.float() * largest[:, None] * 7.874015718698502e-3


def torchao_int8(name: str, weight: torch.Tensor) -> Made:
    """Return what torchao stores of its Int8Tensor; `quantise` writes what it says of it."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127.5
    codes = (weight.float() / scales).round().clamp(-128, 127).to(torch.int8)
    parts = {"qdata": codes, "scale": scales, "zero_point": torch.zeros_like(scales).to(torch.int8)}
    return {f"{name}._weight_{part}": tensor for part, tensor in parts.items()}, codes.float() * scales


def said_by_torchao(tensors: Table, quantised: Table) -> dict[str, str]:
    """Return the metadata of every file of a model with these weights, of which some are quantised."""
    of_type = {"_type": "torch.dtype", "_data": "bfloat16"}
    said = {
        name: {"_type": "Int8Tensor", "_data": {"block_size": [1, tensor.shape[-1]], "dtype": of_type}}
        if name in quantised
        else {"_type": "Tensor"}
        for name, tensor in tensors.items()
    }
    return {**{name: json.dumps(each) for name, each in said.items()}, "tensor_names": json.dumps([*said])}


def nf4_double(name: str, weight: torch.Tensor) -> Made:
    flat = weight.float().reshape(-1, 64)
    largest = flat.abs().amax(1)
    offset = largest.mean()
    levels = torch.linspace(-1, 1, 256)
    outer = (largest - offset).abs().max().reshape(1)
    nested = _nearest((largest - offset) / outer, levels)
    scales = levels[nested.long()] * outer + offset
    codes = _nearest(flat / scales[:, None], _NF4)
    pairs = codes.reshape(-1)
    said = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": offset.item(),
    }
    beside = {
        "absmax": nested,
        "quant_map": _NF4,
        "nested_absmax": outer,
        "nested_quant_map": levels,
        "quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }
    packed = ((pairs[0::2] << 4) | pairs[1::2]).reshape(-1, 1)
    values = (_NF4[codes.long()] * scales[:, None]).to(torch.bfloat16).float().reshape(weight.shape)
    return {f"{name}.weight": packed, **{f"{name}.weight.{key}": tensor for key, tensor in beside.items()}}, values


def gptq(name: str, weight: torch.Tensor) -> Made:
    scales = (_tiles(weight, 1, 32) / 7).to(torch.float16)
    codes = (weight.float() / _spread(scales, 1, 32, weight.shape)).round().clamp(-8, 7)
    zeros = torch.full((scales.shape[1], len(codes) // 8), 0x77777777, dtype=torch.int32)  # 8, stored less one
    return {
        f"{name}.qweight": _words((codes.T + 8).reshape(-1, 8, len(codes)).transpose(1, 2)),
        f"{name}.qzeros": zeros,
        f"{name}.scales": scales.T,
        f"{name}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32,
    }, (codes * _spread(scales, 1, 32, weight.shape)).to(torch.float16).float()


def gpt_oss(name: str, weight: torch.Tensor) -> Made:
    """Return blocks and scales of a stack [experts, in, out]."""
    turned = weight.float().transpose(1, 2).contiguous()
    groups = turned.reshape(*turned.shape[:2], -1, 32)
    powers = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
    codes = _nearest(groups / powers.exp2().unsqueeze(-1), _E2M1)
    values = (_E2M1[codes.long()] * powers.exp2().unsqueeze(-1)).reshape(turned.shape).transpose(1, 2)
    return {f"{name}_blocks": _halves(codes), f"{name}_scales": (powers + 127).to(torch.uint8)}, values.contiguous()


def _stack(name: str, weight: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor, end: str) -> Made:
    codes = _fp8(weight, scales)
    return {name: codes, f"{name}{end}": stored}, codes.float() * scales


def stack_fbgemm(name: str, weight: torch.Tensor) -> Made:
    """Return a stack [experts, in, out] of Llama 4 with a scale for each output, as transformers lays them out."""
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return _stack(name, weight, scales, scales.transpose(1, 2) if name.endswith("down_proj") else scales, "_scale")


def stack_fp8(name: str, weight: torch.Tensor) -> Made:
    """Return a stack with one scale, as modelopt stores it."""
    scale = weight.float().abs().amax() / 448
    made, values = _stack(name, weight, scale, scale, "_weight_scale")
    return {**made, f"{name}_input_scale": torch.ones(())}, values


def stack_nvfp4(name: str, weight: torch.Tensor) -> Made:
    """Return a stack in four bits, quantised along its inputs, as modelopt stores it."""
    turned = weight.float().transpose(1, 2).reshape(-1, weight.shape[1])
    overall = turned.abs().max() / 2688
    scales = (_tiles(turned, 1, 16) / 6 / overall).to(torch.float8_e4m3fn)
    wide = _spread(scales.float() * overall, 1, 16, turned.shape)
    codes = _nearest(turned / wide, _E2M1)
    parts = {name: _halves(codes), f"{name}_weight_scale": scales}
    stored = {each: part.reshape(len(weight), -1, part.shape[1]).transpose(1, 2) for each, part in parts.items()}
    values = (_E2M1[codes.long()] * wide).reshape(len(weight), -1, turned.shape[1]).transpose(1, 2)
    return {**stored, f"{name}_weight_scale_2": overall, f"{name}_input_scale": torch.ones(())}, values.contiguous()


def _compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _int8(strategy: str, group: int, *, packed: bool = False, offset: bool = False) -> Form:
    how = {"group_size": group} if group > 0 else {}
    said = _compressed(num_bits=8, type="int", strategy=strategy, symmetric=not offset, **how)
    return partial(int8, group=group, packed=packed, offset=offset), said


_FP8 = {"quant_method": "fp8", "weight_block_size": [TILE, TILE]}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*self_attn*", "*router"]}
FORMS: dict[str, Form] = {
    "nf4-double": (nf4_double, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bnb-int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "torchao-int8": (torchao_int8, {"quant_method": "torchao", "include_input_output_embeddings": False}),
    "fp8-block": (fp8_block, _FP8 | {"activation_scheme": "dynamic"}),
    "fp8-block-bf16": (partial(fp8_block, scale=torch.bfloat16), _FP8),
    "fp8-powers": (partial(fp8_block, scale=torch.float8_e8m0fnu), _FP8 | {"scale_fmt": "ue8m0"}),
    "fp8-channel": (fp8_channel, _compressed(num_bits=8, type="float", strategy="channel")),
    "fp8-tensor": (fp8_tensor, _compressed(num_bits=8, type="float", strategy="tensor")),
    "int8-channel": _int8("channel", 0),
    "int8-tensor": _int8("tensor", -1),
    "int8-packed": _int8("group", 8, packed=True),
    "int8-packed-tensor": _int8("tensor", -1, packed=True),
    "int8-offset": _int8("channel", 0, offset=True),
    "int8-packed-offset": _int8("group", 8, packed=True, offset=True),
    "int8-packed-tensor-offset": _int8("tensor", -1, packed=True, offset=True),
    "int4": (int4, _compressed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)),
    "nvfp4": (nvfp4, _compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    "fp4": (fp4, _FP8 | {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    # stacks [experts, in, out] of GPT-OSS and of Llama 4
    "mxfp4": (gpt_oss, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
    "stack-fbgemm": (stack_fbgemm, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head", "self_attn"]}),
    "stack-fp8": (stack_fp8, _MODELOPT),
    "stack-nvfp4": (stack_nvfp4, _MODELOPT | {"quant_algo": "NVFP4"}),
}


def quantise(base: Path, out: Path, form: str, chosen: Callable[[str], bool]) -> tuple[Path, Table]:
    """Write `base` to `out` with the weights quantised whose module is `chosen`; return it, and those weights' numbers."""
    make, table = FORMS[form]
    tensors: Table = {}
    for file in sorted(base.glob("*.safetensors")):
        tensors |= load_file(file)
    stored: Table = {}
    values: Table = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if chosen(module):
            made, values[name] = make(module, tensor)
            stored |= {each: part.contiguous().clone() for each, part in made.items()}
        else:
            stored[name] = tensor
    out.mkdir()
    metadata = {"format": "pt"} | (said_by_torchao(tensors, values) if form.startswith("torchao") else {})
    halves = list(stored)[::2], list(stored)[1::2]  # a weight and its scales lie in different files
    for number, names in enumerate(halves, 1):
        file = out / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: stored[name] for name in names}, file, metadata)
    places = {
        name: f"model-{number:05d}-of-00002.safetensors" for number, names in enumerate(halves, 1) for name in names
    }
    total = sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": table}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out, values
