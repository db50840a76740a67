"""Quantised weights that are not stored as their format says, or in a form that is not read: each is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_tool.core.tensors import DType
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.formats.quantised.parts import LayoutError
from lora_tool.formats.stored import read_part
from tests.quantised_samples import config_of
from tests.unit.test_quantised_weights import SAMPLES, changed, said_of, stored, torchao


def levels(sample: str, name: str) -> np.ndarray[Any, Any]:
    """Return the numbers of a table of a sample, of which the fourth is none."""
    found = np.frombuffer(read_part(stored(sample)[name], 0, stored(sample)[name].nbytes), "<f4").copy()
    found[3] = np.nan
    return found


def offset(text: str) -> np.ndarray[Any, Any]:
    """Return the state of a sample of bitsandbytes with another mean of scales."""
    raw = stored(NF4)[STATE]
    said = json.loads(read_part(raw, 0, raw.nbytes))
    return in_bytes(json.dumps({**said, "nested_offset": "HERE"}).replace('"HERE"', text))


def in_bytes(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(text.encode(), np.uint8)


NF4, OWN = "bnb-nf4-double@bfloat16-12x64", "torchao-own-fp8-row"
STATE = "m.weight.quant_state.bitsandbytes__nf4"
SCALES, CODES, WORDS = "m.weight_scale", "m.weight", "m.weight_packed"
SWIZZLED = json.loads(SAMPLES.metadata["torchao-own-mxfp8|m.weight"])["_data"] | {"is_swizzled_scales": True}
FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("fp8-block", {SCALES: None}, {}, r"`m.weight` is F8_E4M3, but has no scale"),
    ("fp8-block", {CODES: None}, {}, r"`m.weight_scale` is a part of a quantised weight"),
    ("fp8-block", {SCALES: (DType.F32, (2, 3))}, {}, r"is \[2, 3\] for .* expected \[3, 3\]"),
    ("fp8-block", {SCALES: (DType.I32, (3, 3))}, {}, r"is I32; expected floats or powers of two"),
    (NF4, {CODES: (DType.U8, (385, 1))}, {}, r"`m.weight` is \[12, 64\], 384 bytes; found: 385 bytes"),
    (NF4, {"m.weight.nested_absmax": None}, {}, r"nested_absmax` is missing"),
    (NF4, {"m.weight.absmax": (DType.U8, (13,))}, {}, r"expected 12 elements"),
    *(
        (NF4, {name: levels(NF4, name)}, {}, r"quant_map` has nan as level 3: expected \d+ finite numbers")
        for name in ("m.weight.quant_map", "m.weight.nested_quant_map")
    ),
    (NF4, {STATE: in_bytes("[" * 50_000)}, {}, "holds no JSON object"),
    *(
        (NF4, {STATE: offset(text)}, {}, "does not give nested_blocksize and nested_offset")
        for text in ("1e39", "NaN", "1" + "0" * 400)
    ),
    ("bnb-int8", {CODES: None}, {}, r"`m.SCB` .*`m.weight` is missing"),
    ("int4-group", {WORDS: (DType.I32, (20, 11))}, {}, r"is \[20, 11\] for a weight of \[20, 96\]"),
    ("int4-group", {SCALES: (DType.BF16, (20, 5))}, {}, r"is \[20, 5\] for a weight of \[20, 96\]"),
    ("int4-group", {WORDS: (DType.F32, (20, 12))}, {}, r"is F32; expected I32 or U8"),
    ("nvfp4", {SCALES: (DType.F8_E4M3, (20, 3))}, {}, r"expected one scale for each 16 values"),
    ("mxfp4", {SCALES: (DType.F32, (20, 3))}, {}, r"is F32; expected F8_E8M0 or U8"),
    ("int8-channel", {SCALES: None}, {}, r"`m.weight` is I8, but has no scale"),
    ("int8-asymmetric", {"m.weight_zero_point": None}, {}, r"`m.weight` has no `m.weight_zero_point`, but the config"),
    ("int4-group-asymmetric", {"m.weight_zero_point": None}, {}, r"no `m.weight_zero_point`, but the config says"),
    ("int4-order", {"m.weight_g_idx": None}, {}, r"`m.weight_packed` has no `m.weight_g_idx`, but the config says"),
    ("gptq-4", {"m.g_idx": np.full(96, 3, np.int32)}, {}, r"`m.g_idx` names groups 3 to 3; there are 3"),
    ("gptq-4-order", {"m.g_idx": None}, {}, r"`m.qweight` has no `m.g_idx`, but the config says `desc_act`"),
    ("gptq-4", {"m.g_idx": None}, {"group_size": 128}, r"has 3 groups of 96 inputs, but the config says .* are of 128"),
    (OWN, {}, {"own": {}}, r"of which the metadata of the files does not say the class"),
    (OWN, {}, {"own": {"m.weight": "[1]"}}, r"does not say the class"),
    (OWN, {}, {"own": torchao("Float8Tensor", block_size=[1, 95])}, r"blocks of \[1, 95\] do not fill"),
    (OWN, {}, {"own": torchao("Float8Tensor", block_size=[1, 32])}, r"expected \[32, 3\]"),
    (OWN, {"m._weight_scale": None}, {}, r"its other part `m._weight_scale` is missing"),
    (OWN, {"m._weight_qdata": None}, {}, r"`m._weight_scale` is a part of a quantised weight"),
]
"""Sample, changes of its tensors and of its config, and what is wrong: the file is."""
AUTO = "auto-round-gptq"
UNREAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (OWN, {}, {"own": torchao("Int4Tensor")}, r"is part of torchao's Int4Tensor"),
    (OWN, {}, {"own": torchao("Int8Tensor", block_size=[1, 96])}, r"is F8_E4M3; lora-tool reads I8"),
    ("torchao-own-mxfp8", {}, {"own": torchao("MXTensor", **SWIZZLED)}, "has scales in the order of a GPU's kernel"),
    ("fp8-block", {CODES: (DType.F8_E5M2, (36, 80))}, {}, r"F8_E5M2, and lora-tool does not read codes of that dtype"),
    ("gptq-4", {}, {"bits": 3}, r"`m.qweight` has codes of 3 bits, which lora-tool does not read"),
    ("mxfp4", {WORDS: (DType.U8, (20, 72))}, {}, r"holds floats of six bits \(mxfp6\)"),
    ("fp8-channel", {"m.pre_quant_scale": (DType.U8, (1,))}, {}, "lora-tool does not read modelopt's AWQ"),
    ("fp8-channel", {"m.bitmask": (DType.U8, (1,))}, {}, "the mask of a sparse weight"),
    ("fp8-channel", {}, {"transform_config": {"config_groups": {"u": {}}}}, r"\(`transform_config`\)"),
    (AUTO, {}, {"packing_format": "auto_round:mlx"}, "is packed as auto_round:mlx, which"),
    (AUTO, {}, {"packing_format": "auto_round:llm_compressor", "data_type": "mx_int"}, "with values of mx_int, which"),
    (AUTO, {}, {"extra_config": {"m": {"data_type": "mx_fp"}}}, "with values of mx_fp, which"),
    (AUTO, {}, {"act_bits": 8}, "rounded again for inputs of 8 bits"),
    (AUTO, {}, {"rotation_config": {"hadamard_type": "hadamard"}}, "layers rotate their inputs"),
    (AUTO, {}, {"bits": 3}, "has codes of 3 bits, which"),
    (AUTO, {}, {"quant_method": "compressed-tensors", "format": "nvfp4-e5m3-pack-quantized"}, "packed as nvfp4-e5m3"),
]
"""The same where nothing is wrong, but lora-tool does not read it."""


@pytest.mark.parametrize(
    ("sample", "changes", "said", "words", "is_fault"),
    [(*row, True) for row in FAULTS] + [(*row, False) for row in UNREAD],
)
def test_what_is_not_stored_as_its_format_says_or_not_read_is_named(
    sample: str, changes: dict[str, Any], said: dict[str, Any], words: str, is_fault: bool, tmp_path: Path
) -> None:
    said = config_of(sample) | said
    own = said.pop("own", said_of(sample))
    with pytest.raises(LayoutError, match=words) as error:
        read_quantised(changed(sample, changes, tmp_path), said, own)
    assert error.value.is_fault == is_fault
