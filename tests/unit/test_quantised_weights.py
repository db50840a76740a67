"""Quantised weights are the numbers that their own libraries make of them, bit for bit, by both formulas."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.formats.quantised.encodings import ColumnIntegers, Encoding, dequantised
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.formats.quantised.grids import is_requantisable
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.stored import read_part
from lora_tool.verification.elements import Files
from tests import checkpoint_edits as edit
from tests.quantised_samples import KEPT, ROUNDED, config_of

SAMPLES = scan_file(KEPT)
ALL = SAMPLES.tensors
NAMES = sorted({name.partition("|")[0] for name in ALL})


def stored(sample: str) -> dict[str, StoredTensor]:
    """Return the tensors of a sample under the names of a checkpoint."""
    found = {}
    for name, tensor in ALL.items():
        of, _, own = name.partition("|")
        if of == sample and own != "expected":
            spec = type(tensor.spec)(name=own, dtype=tensor.dtype, shape=tensor.shape)
            found[own] = StoredTensor(spec=spec, spans=tensor.spans)
    return found


def said_of(sample: str) -> dict[str, str]:
    """Return what torchao says of a sample in the metadata of the file."""
    return {name.partition("|")[2]: text for name, text in SAMPLES.metadata.items() if name.startswith(f"{sample}|")}


def encoding_in(sample: str) -> Encoding:
    """Return how the weight of a sample is stored."""
    (encoding,) = read_quantised(stored(sample), config_of(sample), said_of(sample)).weights.values()
    return encoding


def expected(sample: str) -> StoredTensor:
    return ALL[f"{sample}|expected"]


def as_dtype(raw: bytes, tensor: StoredTensor, wanted: StoredTensor) -> np.ndarray[Any, Any]:
    """Return values rounded to the type of the library's: some of ours are float32 until ΔW is added."""
    from lora_tool.execution.kernels import STORAGE

    values = np.frombuffer(raw, STORAGE[tensor.dtype]).astype(STORAGE[wanted.dtype]).reshape(tensor.shape)
    # modelopt's table has no -0
    return values + np.zeros(1, values.dtype) if wanted.name.startswith("modelopt") else values


@pytest.mark.parametrize("sample", NAMES)
def test_both_formulas_give_the_bits_of_the_library(sample: str) -> None:
    encoding = encoding_in(sample)
    tensor, wanted = dequantised(encoding), expected(sample)
    assert encoding.spec.name == "m.weight"
    assert tensor.shape == wanted.shape
    library = as_dtype(read_part(wanted, 0, wanted.nbytes), wanted, wanted)
    assert as_dtype(read_part(tensor, 0, tensor.nbytes), tensor, wanted).tobytes() == library.tobytes()
    with Files() as files:
        again = files.read(tensor, 0, tensor.nbytes).tobytes()
        some = files.rows(tensor, [(1, 3), (5, 6)]).tobytes()
    assert as_dtype(again, tensor, wanted).tobytes() == library.tobytes()
    row = tensor.nbytes // tensor.shape[0]
    assert some == again[row : 3 * row] + again[5 * row : 6 * row]
    # any part of it, whole rows or not
    for start, nbytes in ((0, row), (row, 2 * row), (row // 2, row), (tensor.nbytes - 2 * row, 2 * row)):
        assert read_part(tensor, start, nbytes) == again[start : start + nbytes]


PLAIN = scan_file(ROUNDED).tensors


@pytest.mark.parametrize("sample", sorted({name.partition("|")[0] for name in PLAIN}))
def test_a_plain_weight_is_rounded_to_the_bits_of_the_library(sample: str) -> None:
    source, wanted = PLAIN[f"{sample}|source"], PLAIN[f"{sample}|expected"]
    library = read_part(wanted, 0, wanted.nbytes)
    tensor = TrainedAs(sample.partition("@")[0]).rounded(source)
    assert tensor.dtype is wanted.dtype
    assert read_part(tensor, 0, tensor.nbytes) == library
    row = tensor.nbytes // tensor.shape[0]
    with Files() as files:
        assert files.read(tensor, 0, tensor.nbytes).tobytes() == library
        assert files.rows(tensor, [(2, 3), (4, 6)]).tobytes() == library[2 * row : 3 * row] + library[4 * row : 6 * row]
    last = tensor.nbytes - row
    assert read_part(tensor, last, row) == library[last:]


def changed(sample: str, changes: dict[str, Any], folder: Path) -> dict[str, StoredTensor]:
    """Return a sample with some tensors left out (None), of another type or shape in the header, or of these numbers."""
    found = stored(sample)
    for name, change in changes.items():
        if isinstance(change, np.ndarray):
            save_file({name: change}, folder / "changed.safetensors")
            found |= scan_file(folder / "changed.safetensors").tensors
            continue
        tensor = found.pop(name, None) or next(iter(found.values()))
        if change is not None:
            dtype, shape = change
            spec = TensorSpec(name=name, dtype=dtype, shape=shape)
            found[name] = StoredTensor(spec=spec, spans=(replace(tensor.spans[0], offset=0, nbytes=spec.nbytes),))
    return found


def torchao(kind: str, **data: Any) -> dict[str, str]:
    """Return the metadata of a file with one weight of torchao's class `kind`."""
    of_type = {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": None}
    return {"m.weight": json.dumps({"_type": kind, "_data": {**of_type, **data}})}


def test_groups_of_columns_are_those_of_the_config(tmp_path: Path) -> None:
    """Without the indices of groups, which GPTQ's packers may leave out, the inputs are in order."""
    tensors, config = changed("gptq-4", {"m.g_idx": None}, tmp_path), config_of("gptq-4")
    in_order = dequantised(read_quantised(tensors, config).weights["m.weight"])
    wanted = expected("gptq-4")
    assert read_part(in_order, 0, in_order.nbytes) == read_part(wanted, 0, wanted.nbytes)
    for said, group in (({"group_size": 40}, 40), ({"group_size": 16, "dynamic": {"m": {"group_size": 32}}}, 32)):
        found = read_quantised(tensors, config | said).weights["m.weight"]
        assert isinstance(found, ColumnIntegers)
        assert found.group == group


def require(tensor: StoredTensor, values: np.ndarray[Any, Any]) -> None:
    """Assert that both formulas give these float32 values, of the whole and of rows of it; -0 is 0 where a format has none."""
    assert (tensor.shape, tensor.dtype) == (values.shape, DType.F32)
    rows = values.reshape(-1, values.shape[-1]).astype("<f4") + np.float32(0)
    row = rows.shape[1] * 4
    with Files() as files:
        for first, last in ((0, len(rows)), (3, 8), (15, 16), (len(rows) - 7, len(rows) - 1)):
            start, nbytes = first * row, (last - first) * row
            for raw in (read_part(tensor, start, nbytes), files.read(tensor, start, nbytes).tobytes()):
                assert (np.frombuffer(raw, "<f4") + np.float32(0)).tobytes() == rows[first:last].tobytes()


STACK = (3, 20, 50)
LAYOUTS = [
    *(
        ("fp8", "_scale_inv", *layout, dtype)
        for layout in (
            ((20, 50), (2, 2), (16, 32)),  # ragged on both sides
            (STACK, (3, 2, 2), (16, 32)),  # fused experts
        )
        for dtype in ("F32", "BF16", "F16", "F8_E8M0", "U8")
    ),
    ("fp8", "_scale_inv", (192, 300), (2, 3), (128, 128), "BF16"),
    ("fp8", "_scale_inv", (20, 50), (), (20, 50), "F32"),
    ("fp8", "_scale_inv", (20, 50), (1,), (20, 50), "F16"),
    ("fp8", "_scale_inv", (20, 50), (20,), (1, 50), "F32"),  # fbgemm
    ("fp8", "_scale_inv", STACK, (3, 1, 1), (20, 50), "F32"),
    ("fp8", "_scale_inv", STACK, (3,), (20, 50), "BF16"),
    ("fp8", "_scale_inv", STACK, (3, 1, 50), (20, 1), "U8"),
    ("fbgemm_fp8", "_scale", STACK, (3, 1, 50), (20, 1), "F32"),  # Llama 4's gate_up_proj
    ("fbgemm_fp8", "_scale", STACK, (3, 50, 1), (20, 1), "F32"),  # and its down_proj
    ("fbgemm_fp8", "_scale", (3, 20, 20), (3, 20, 1), (20, 1), "F32"),
    ("modelopt", "_scale", (150, 300), (2, 1, 3, 1), (128, 128), "F32"),
    ("modelopt", "_weight_scale", STACK, (), (20, 50), "F32"),  # one for all experts
    ("modelopt", "_weight_scale", STACK, (1,), (20, 50), "F32"),
    ("mxfp8", "_scale_inv", (20, 64), (20, 2), (1, 32), "U8"),
]


@pytest.mark.parametrize(("method", "end", "shape", "grid", "tile", "dtype"), LAYOUTS)
def test_scales_as_each_method_lays_them_out(
    method: str,
    end: str,
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    tile: tuple[int, int],
    dtype: str,
    tmp_path: Path,
) -> None:
    """FP8 codes with scales are codes times scales."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 127, shape, dtype=np.uint8) | (rng.integers(0, 2, shape, dtype=np.uint8) << 7)
    numbers = {"F32": "<f4", "BF16": ml_dtypes.bfloat16, "F16": "<f2", "F8_E8M0": "u1", "U8": "u1"}[dtype]
    count = math.prod(grid)
    stored_scales = (rng.integers(110, 130, count) if numbers == "u1" else rng.random(count)).astype(numbers)
    scales = np.exp2(stored_scales.astype(np.float32) - 127) if numbers == "u1" else stored_scales.astype(np.float32)
    lead, (rows, columns) = shape[:-2], shape[-2:]
    tiles = (*lead, -(-rows // tile[0]), -(-columns // tile[1]))
    spread = np.broadcast_to(scales, tiles) if count == 1 else scales.reshape(tiles)
    wide = spread.repeat(tile[0], axis=-2).repeat(tile[1], axis=-1)[..., :rows, :columns]
    name = "experts.down_proj" if len(shape) > 2 else "m.weight"
    table = {
        name: edit.Raw("F8_E4M3", shape, codes.tobytes()),
        f"{name}{end}": edit.Raw(dtype, grid, stored_scales.tobytes()),
    }
    edit.write(tmp_path / "w.safetensors", table)
    said = {"quant_method": method, **({"weight_block_size": [*tile]} if method in ("fp8", "mxfp8") else {})}
    found = read_quantised(scan_file(tmp_path / "w.safetensors").tensors, said).weights[name]
    require(dequantised(found), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide)


def test_stacks_of_modelopt_are_quantised_along_the_inputs_of_turned_matrices(tmp_path: Path) -> None:
    sample = stored("modelopt-nvfp4@float32")
    codes, scales = (
        np.frombuffer(read_part(sample[name], 0, sample[name].nbytes), np.uint8).reshape(sample[name].shape)
        for name in ("m.weight", "m.weight_scale")
    )
    two = [np.stack([part.T, np.roll(part, 1, axis=0).T]) for part in (codes, scales)]
    overall = sample["m.weight_scale_2"]
    name = "experts.down_proj"
    table = {
        name: edit.Raw("U8", two[0].shape, two[0].tobytes()),
        f"{name}_weight_scale": edit.Raw("F8_E4M3", two[1].shape, two[1].tobytes()),
        f"{name}_weight_scale_2": edit.Raw("F32", (), read_part(overall, 0, 4)),
        f"{name}_input_scale": edit.Raw("F32", (), read_part(overall, 0, 4)),
    }
    edit.write(tmp_path / "w.safetensors", table)
    found = read_quantised(scan_file(tmp_path / "w.safetensors").tensors, {"quant_method": "modelopt"})
    tensor, wanted = dequantised(found.weights[name]), expected("modelopt-nvfp4@float32")
    assert found.calibrated == (f"{name}_input_scale",)
    library = np.frombuffer(read_part(wanted, 0, wanted.nbytes), "<f4").reshape(wanted.shape)
    require(tensor, np.stack([library.T, np.roll(library, 1, axis=0).T]))


@pytest.mark.parametrize("form", ["gptq", "gpt-oss"])
def test_a_few_rows_of_what_lies_turned_need_little_memory(form: str, tmp_path: Path) -> None:
    if form == "gptq":
        codes, zeros, scales = np.zeros((64, 16384), "i4"), np.zeros((4, 2048), "i4"), np.ones((4, 16384), "f2")
        tensors = {"m.qweight": codes, "m.qzeros": zeros, "m.scales": scales}
        table = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    else:
        tensors = {
            "m.up_proj_blocks": np.zeros((1, 1024, 256, 16), "u1"),
            "m.up_proj_scales": np.full((1, 1024, 256), 127, "u1"),
        }
        table = {"quant_method": "mxfp4"}
    save_file(tensors, tmp_path / "m.safetensors")
    (encoding,) = read_quantised(scan_file(tmp_path / "m.safetensors").tensors, table).weights.values()
    tensor = dequantised(encoding)
    read_part(tensor, 0, 2)  # what is imported and kept is not counted
    tracemalloc.start()
    try:
        read_part(tensor, 0, tensor.nbytes // tensor.shape[-2] * 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20, "4 MB of codes were in memory"


@pytest.mark.parametrize(
    ("kind", "block", "scales"),
    [
        ("Float8Tensor", [1, 1, 64], (3, 16, 1)),
        ("Float8Tensor", [3, 16, 64], (1, 1, 1)),  # one scale for all experts
        ("Float8Tensor", [], ()),
        ("Int8Tensor", [1, 8, 32], (3, 2, 2)),
    ],
)
def test_stacks_of_torchao(kind: str, block: list[int], scales: tuple[int, ...], tmp_path: Path) -> None:
    rng, name = np.random.default_rng(5), "experts._up_proj"
    of_type = ml_dtypes.float8_e4m3fn if kind == "Float8Tensor" else np.int8
    codes = rng.integers(0, 127, (3, 16, 64), dtype=np.uint8)
    each, zeros = rng.random(scales, np.float32), np.zeros(scales, np.int8)
    edit.write(
        tmp_path / "w.safetensors",
        {
            f"{name}_qdata": edit.Raw("F8_E4M3" if of_type is not np.int8 else "I8", codes.shape, codes.tobytes()),
            f"{name}_scale": edit.Raw("F32", scales, each.tobytes()),
            **({f"{name}_zero_point": edit.Raw("I8", scales, zeros.tobytes())} if of_type is np.int8 else {}),
        },
    )
    found = read_quantised(
        scan_file(tmp_path / "w.safetensors").tensors,
        {"quant_method": "torchao"},
        {"experts.up_proj": torchao(kind, block_size=block)["m.weight"]},
    )
    assert not found.calibrated
    tensor = dequantised(found.weights["experts.up_proj"])
    sides = block or [3, 16, 64]
    wide = each.reshape([size // side for size, side in zip((3, 16, 64), sides, strict=True)])
    for axis, side in enumerate(sides):
        wide = wide.repeat(side, axis)
    require(tensor, codes.view(of_type).astype(np.float32) * wide)


BLOCK = config_of("fp8-block")["config_groups"]["group_0"]["weights"]
FOUR = {"weights": config_of("int8-channel")["config_groups"]["group_0"]["weights"] | {"num_bits": 4}}


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ("fp8-block", {"config_groups": {"group_0": {"weights": BLOCK | {"block_structure": "16x32"}}}}),  # older files
        ("gptq-8", {"bits": 4, "dynamic": {r"+:.*down.*": {"bits": 8}, "-:.*": {}}}),  # modules of other bits
        (
            "int8-channel",
            {"config_groups": config_of("int8-channel")["config_groups"] | {"x": FOUR | {"format": "pack-quantized"}}},
        ),
    ],
)
def test_another_way_to_say_the_same(sample: str, said: dict[str, Any]) -> None:
    found = read_quantised(stored(sample), config_of(sample) | said)
    assert found.weights["m.weight"] == encoding_in(sample)


def test_bytes_of_which_the_config_says_that_they_hold_four_bits_are_only_read() -> None:
    """compressed-tensors stores the weights of W4A8 as int8: codes of eight bits would be cut off by who reads four."""
    found = read_quantised(stored("int8-channel"), config_of("int8-channel") | {"config_groups": {"group_0": FOUR}})
    four, eight = found.weights["m.weight"], encoding_in("int8-channel")
    assert (str(four), str(eight)) == ("int4 per row", "int8 per row")
    assert not is_requantisable(four)
    assert is_requantisable(eight)
    assert read_part(dequantised(four), 0, 96) == read_part(dequantised(eight), 0, 96)
