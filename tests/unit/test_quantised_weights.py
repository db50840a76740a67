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

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import ColumnIntegers, Encoding, dequantised
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.formats.quantised.grids import is_requantisable
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.formats.quantised.parts import LayoutError
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


def encoding_in(sample: str) -> Encoding:
    """Return how the weight of a sample is stored."""
    said = {name.partition("|")[2]: text for name, text in SAMPLES.metadata.items() if name.startswith(f"{sample}|")}
    (encoding,) = read_quantised(stored(sample), config_of(sample), said).weights.values()
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


def changed(sample: str, **changes: Any) -> dict[str, StoredTensor]:
    """Return a sample with some tensors left out (None), or of another type or shape in the header."""
    found = stored(sample)
    for name, change in changes.items():
        place = name.replace("__", ".")
        tensor = found.pop(place)
        if change is not None:
            dtype, shape = change
            spec = type(tensor.spec)(name=place, dtype=dtype, shape=shape)
            span = type(tensor.spans[0])(path=tensor.path, offset=0, nbytes=spec.nbytes)
            found[place] = StoredTensor(spec=spec, spans=(span,))
    return found


@pytest.mark.parametrize(
    ("sample", "changes", "words"),
    [
        ("fp8-block", {"m__weight_scale": None}, r"`m.weight` is F8_E4M3, but has no scale"),
        ("fp8-block", {"m__weight": None}, r"`m.weight_scale` is a part of a quantised weight"),
        ("fp8-block", {"m__weight_scale": (DType.F32, (2, 3))}, r"is \[2, 3\] for .* expected \[3, 3\]"),
        (
            "fp8-block",
            {"m__weight": (DType.F8_E5M2, (36, 80))},
            r"`m.weight` is F8_E5M2, and lora-tool does not read codes of that dtype",
        ),
        ("fp8-block", {"m__weight_scale": (DType.I32, (3, 3))}, r"is I32; expected floats or powers of two"),
        (
            "bnb-nf4-double@bfloat16-12x64",
            {"m__weight": (DType.U8, (385, 1))},
            r"`m.weight` is \[12, 64\], 384 bytes; found: 385 bytes",
        ),
        ("bnb-nf4-double@bfloat16-12x64", {"m__weight__nested_absmax": None}, r"nested_absmax` is missing"),
        ("bnb-nf4-double@bfloat16-12x64", {"m__weight__absmax": (DType.U8, (13,))}, r"expected 12 elements"),
        ("bnb-int8", {"m__weight": None}, r"`m.SCB` .*`m.weight` is missing"),
        ("int4-group", {"m__weight_packed": (DType.I32, (20, 11))}, r"is \[20, 11\] for a weight of \[20, 96\]"),
        ("int4-group", {"m__weight_scale": (DType.BF16, (20, 5))}, r"is \[20, 5\] for a weight of \[20, 96\]"),
        ("int4-group", {"m__weight_packed": (DType.F32, (20, 12))}, r"is F32; expected I32 or U8"),
        ("nvfp4", {"m__weight_scale": (DType.F8_E4M3, (20, 3))}, r"expected one scale for each 16 values"),
        ("mxfp4", {"m__weight_scale": (DType.F32, (20, 3))}, r"is F32; expected F8_E8M0 or U8"),
        ("int8-channel", {"m__weight_scale": None}, r"`m.weight` is I8, but has no scale"),
        ("int8-asymmetric", {"m__weight_zero_point": None}, r"`m.weight` has no `m.weight_zero_point`, but the config"),
        ("int4-group-asymmetric", {"m__weight_zero_point": None}, r"has no `m.weight_zero_point`, but the config says"),
        ("int4-order", {"m__weight_g_idx": None}, r"`m.weight_packed` has no `m.weight_g_idx`, but the config says"),
    ],
)
def test_what_is_not_stored_as_its_format_says_is_named(sample: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        read_quantised(changed(sample, **changes), config_of(sample))


@pytest.mark.parametrize("name", ["m.weight.quant_map", "m.weight.nested_quant_map"])
def test_a_level_that_is_no_number_is_named(name: str, tmp_path: Path) -> None:
    found = stored("bnb-nf4-double@bfloat16-12x64")
    levels = np.frombuffer(read_part(found[name], 0, found[name].nbytes), "<f4").copy()
    levels[3] = np.nan
    save_file({name: levels}, tmp_path / "w.safetensors")
    with pytest.raises(LayoutError, match=r"quant_map` has nan as level 3: expected \d+ finite numbers"):
        read_quantised({**found, **scan_file(tmp_path / "w.safetensors").tensors}, {"quant_method": "bitsandbytes"})


def in_columns(folder: Path, method: str, bits: int, *, ordered: bool, **said: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """Return a weight as GPTQ or AWQ packs it, one code after the other, and its numbers."""
    rng = np.random.default_rng(bits)
    outputs, inside, group = 16, 64, 32
    each, top = 32 // bits, 1 << bits
    codes = rng.integers(0, top, (inside, outputs))
    zeros = rng.integers(1, top, (inside // group, outputs))
    scales = rng.random((inside // group, outputs)).astype(np.float16)
    groups = np.arange(inside) // group if ordered else rng.integers(0, inside // group, inside)
    less = 1 if method == "gptq" and said.get("checkpoint_format") != "gptq_v2" else 0
    awq = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight = np.zeros((inside, outputs // each) if method == "awq" else (inside // each, outputs), np.uint32)
    qzeros = np.zeros((inside // group, outputs // each), np.uint32)
    for row, column in np.ndindex(*codes.shape):
        if method == "awq":
            qweight[row, column // 8] |= np.uint32(int(codes[row, column]) << 4 * awq.index(column % 8))
        else:
            qweight[row // each, column] |= np.uint32(int(codes[row, column]) << bits * (row % each))
    for row, column in np.ndindex(*zeros.shape):
        place = awq.index(column % 8) if method == "awq" else column % each
        qzeros[row, column // each] |= np.uint32(int(zeros[row, column] - less) << bits * place)
    table = {
        "m.qweight": edit.Raw("I32", qweight.shape, qweight.tobytes()),
        "m.qzeros": edit.Raw("I32", qzeros.shape, qzeros.tobytes()),
        "m.scales": edit.Raw("F16", scales.shape, scales.tobytes()),
    }
    if not ordered:
        table["m.g_idx"] = edit.Raw("I32", (inside,), groups.astype(np.int32).tobytes())
    edit.write(folder / "w.safetensors", table)
    values = ((codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)).astype(np.float16).T
    found = read_quantised(scan_file(folder / "w.safetensors").tensors, {"quant_method": method, "bits": bits, **said})
    return found.weights["m.weight"], np.ascontiguousarray(values)


@pytest.mark.parametrize(
    ("method", "bits", "ordered", "said"),
    [
        ("gptq", 4, True, {}),
        ("gptq", 4, False, {"desc_act": True}),
        ("gptq", 8, True, {"checkpoint_format": "gptq_v2"}),
        ("gptq", 2, False, {}),
        ("awq", 4, True, {"version": "gemm"}),
    ],
)
def test_gptq_and_awq_are_what_was_packed(
    method: str, bits: int, ordered: bool, said: dict[str, Any], tmp_path: Path
) -> None:
    encoding, values = in_columns(tmp_path, method, bits, ordered=ordered, **said)
    tensor = dequantised(encoding)
    assert (tensor.shape, tensor.dtype) == (values.shape, DType.F16)
    assert read_part(tensor, 0, tensor.nbytes) == values.tobytes()
    with Files() as files:
        assert files.read(tensor, 0, tensor.nbytes).tobytes() == values.tobytes()
        assert files.rows(tensor, [(3, 7), (9, 10)]).tobytes() == values[[3, 4, 5, 6, 9]].tobytes()
    assert read_part(tensor, 128 * 3, 128 * 2) == values[3:5].tobytes()


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    in_columns(tmp_path, "gptq", 4, ordered=False)
    with edit.tensors(tmp_path, "w.safetensors") as table:
        table["m.g_idx"] = edit.Raw("I32", (64,), np.full(64, 2, np.int32).tobytes())
    with pytest.raises(LayoutError, match=r"`m.g_idx` names groups 2 to 2; there are 2"):
        read_quantised(scan_file(tmp_path / "w.safetensors").tensors, {"quant_method": "gptq", "bits": 4})
    with edit.tensors(tmp_path, "w.safetensors") as table:
        del table["m.g_idx"]
    with pytest.raises(LayoutError, match=r"`m.qweight` has no `m.g_idx`, but the config says `desc_act`"):
        read_quantised(scan_file(tmp_path / "w.safetensors").tensors, {"quant_method": "gptq", "desc_act": True})
    with pytest.raises(LayoutError, match=r"`m.qweight` has codes of 3 bits, which lora-tool does not read"):
        read_quantised(scan_file(tmp_path / "w.safetensors").tensors, {"quant_method": "gptq", "bits": 3})


def test_groups_of_columns_are_those_of_the_config(tmp_path: Path) -> None:
    in_columns(tmp_path, "gptq", 4, ordered=True)
    tensors = scan_file(tmp_path / "w.safetensors").tensors
    for said, group in (({"group_size": 48}, 48), ({"group_size": 16, "dynamic": {"m": {"group_size": 32}}}, 32)):
        found = read_quantised(tensors, {"quant_method": "gptq", "bits": 4, **said}).weights["m.weight"]
        assert isinstance(found, ColumnIntegers)
        assert found.group == group
    with pytest.raises(LayoutError, match=r"`m.scales` has 2 groups of 64 inputs, but the config says .* are of 128"):
        read_quantised(tensors, {"quant_method": "gptq", "bits": 4, "group_size": 128})


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"packing_format": "auto_round:mlx"}, "is packed as auto_round:mlx, which"),
        ({"packing_format": "auto_round:llm_compressor", "data_type": "mx_int"}, "with values of mx_int, which"),
        (
            {"packing_format": "auto_round", "extra_config": {"m": {"data_type": "mx_fp"}}},
            "with values of mx_fp, which",
        ),
        ({"act_bits": 8}, "rounded again for inputs of 8 bits"),
        ({"rotation_config": {"hadamard_type": "hadamard"}}, "layers rotate their inputs"),
        ({"bits": 3}, "has codes of 3 bits, which"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-e5m3-pack-quantized"}, "packed as nvfp4-e5m3"),
    ],
)
def test_what_auto_round_writes_otherwise_is_refused_by_name(said: dict[str, Any], words: str) -> None:
    table = {"quant_method": "auto-round", "bits": 4, "group_size": 32, **said}
    with pytest.raises(LayoutError, match=words) as raised:
        read_quantised(stored("auto-round-gptq"), table)
    assert not raised.value.is_fault


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E8M0", "U8"])
@pytest.mark.parametrize(
    ("shape", "grid", "tile"),
    [
        ((20, 50), (2, 2), (16, 32)),  # ragged on both sides
        ((192, 300), (2, 3), (128, 128)),
        ((20, 50), (), (20, 50)),
        ((20, 50), (1,), (20, 50)),
        ((20, 50), (20,), (1, 50)),  # fbgemm
        ((20, 50), (20, 1), (1, 50)),
        ((3, 20, 50), (3, 2, 2), (16, 32)),  # fused experts
        ((3, 20, 50), (3, 1, 1), (20, 50)),
        ((3, 20, 50), (3,), (20, 50)),
        ((3, 20, 50), (3, 1, 50), (20, 1)),
    ],
)
def test_tiles_of_every_kind_of_scale(
    shape: tuple[int, ...], grid: tuple[int, ...], tile: tuple[int, int], dtype: str, tmp_path: Path
) -> None:
    names = ("experts.up_proj", "experts.up_proj_scale_inv") if len(shape) > 2 else ("m.weight", "m.weight_scale_inv")
    said = {"quant_method": "fp8", "weight_block_size": [*tile]}
    compare_tiles(shape, grid, tile, dtype, names, said, tmp_path)


@pytest.mark.parametrize(
    ("method", "end", "shape", "grid", "tile"),
    [
        ("fbgemm_fp8", "_scale", (3, 20, 50), (3, 1, 50), (20, 1)),  # Llama 4's gate_up_proj
        ("fbgemm_fp8", "_scale", (3, 20, 50), (3, 50, 1), (20, 1)),  # and its down_proj
        ("fbgemm_fp8", "_scale", (3, 20, 20), (3, 20, 1), (20, 1)),
        ("modelopt", ".weight_scale", (150, 300), (2, 1, 3, 1), (128, 128)),
        ("modelopt", "_weight_scale", (3, 20, 50), (), (20, 50)),  # one for all experts
        ("modelopt", "_weight_scale", (3, 20, 50), (1,), (20, 50)),
        ("mxfp8", ".weight_scale_inv", (20, 64), (20, 2), (1, 32)),
    ],
)
def test_scales_as_each_method_lays_them_out(
    method: str, end: str, shape: tuple[int, ...], grid: tuple[int, ...], tile: tuple[int, int], tmp_path: Path
) -> None:
    names = ("m.weight", f"m{end}") if len(shape) == 2 else ("experts.down_proj", f"experts.down_proj{end}")
    said = {"quant_method": method, **({"weight_block_size": [1, 32]} if method == "mxfp8" else {})}
    compare_tiles(shape, grid, tile, "U8" if method == "mxfp8" else "F32", names, said, tmp_path)


def compare_tiles(
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    tile: tuple[int, int],
    dtype: str,
    names: tuple[str, str],
    said: dict[str, Any],
    folder: Path,
) -> None:
    """Write FP8 codes with scales, and compare what both formulas make of them with codes times scales."""
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
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * wide
    table = {
        names[0]: edit.Raw("F8_E4M3", shape, codes.tobytes()),
        names[1]: edit.Raw(dtype, grid, stored_scales.tobytes()),
    }
    edit.write(folder / "w.safetensors", table)
    found = read_quantised(scan_file(folder / "w.safetensors").tensors, said).weights[names[0]]
    tensor = dequantised(found)
    assert (tensor.shape, tensor.dtype) == (shape, DType.F32)
    assert read_part(tensor, 0, tensor.nbytes) == values.astype("<f4").tobytes()
    row = columns * 4
    assert read_part(tensor, 17 * row, 2 * row) == values.reshape(-1, columns)[17:19].astype("<f4").tobytes()
    with Files() as files:
        assert files.read(tensor, 0, tensor.nbytes).tobytes() == values.astype("<f4").tobytes()


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
    values = np.stack([library.T, np.roll(library, 1, axis=0).T])
    assert tensor.shape == values.shape
    row = values.shape[-1] * 4
    with Files() as files:
        for first, last in ((0, 2 * wanted.shape[1]), (3, 8), (90, 101), (15, 16)):
            some = values.reshape(-1, values.shape[-1])[first:last]
            for raw in (
                read_part(tensor, first * row, len(some) * row),
                files.read(tensor, first * row, len(some) * row).tobytes(),
            ):
                assert (np.frombuffer(raw, "<f4") + np.float32(0)).tobytes() == (some + np.float32(0)).tobytes()


@pytest.mark.parametrize(
    ("name", "said", "words"),
    [
        ("m.pre_quant_scale", {}, "scales its layer's input: lora-tool does not read modelopt's AWQ"),
        ("m.bitmask", {}, "the mask of a sparse weight"),
        ("other", {"transform_config": {"config_groups": {"u": {}}}}, r"\(`transform_config`\)"),
    ],
)
def test_what_is_only_a_part_of_a_weight_is_refused_by_name(name: str, said: dict[str, Any], words: str) -> None:
    found = stored("fp8-channel")
    found[name] = replace(found["m.weight"], spec=replace(found["m.weight"].spec, name=name, dtype=DType.U8))
    with pytest.raises(LayoutError, match=words) as error:
        read_quantised(found, config_of("fp8-channel") | said)
    assert not error.value.is_fault


@pytest.mark.parametrize("form", ["gptq", "gpt-oss"])
def test_a_few_rows_of_what_lies_turned_need_little_memory(form: str, tmp_path: Path) -> None:
    if form == "gptq":
        codes, zeros, scales = np.zeros((128, 16384), "i4"), np.zeros((8, 2048), "i4"), np.ones((8, 16384), "f2")
        tensors = {"m.qweight": codes, "m.qzeros": zeros, "m.scales": scales}
        table = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    else:
        tensors = {
            "m.up_proj_blocks": np.zeros((1, 16384, 32, 16), "u1"),
            "m.up_proj_scales": np.full((1, 16384, 32), 127, "u1"),
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
    assert peak < 6 << 20, "8 MB of codes were in memory"


OF_TORCHAO = {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}, "act_quant_kwargs": None}


def said_by_torchao(kind: str, **data: Any) -> dict[str, str]:
    """Return the metadata of a file with one weight of torchao's class `kind`."""
    return {"experts.up_proj": json.dumps({"_type": kind, "_data": {**OF_TORCHAO, **data}})}


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
        said_by_torchao(kind, block_size=block),
    )
    assert not found.calibrated
    tensor = dequantised(found.weights["experts.up_proj"])
    sides = block or [3, 16, 64]
    wide = each.reshape([size // side for size, side in zip((3, 16, 64), sides, strict=True)])
    for axis, side in enumerate(sides):
        wide = wide.repeat(side, axis)
    values = (codes.view(of_type).astype(np.float32) * wide).tobytes()
    assert read_part(tensor, 0, tensor.nbytes) == values
    with Files() as files:
        assert files.read(tensor, 0, tensor.nbytes).tobytes() == values


@pytest.mark.parametrize(
    ("said", "changes", "words", "is_fault"),
    [
        ({}, {}, r"is part of `m.weight`, of which the metadata of the files does not say the class", True),
        ({"m.weight": "[1]"}, {}, r"does not say the class", True),
        ({"m.weight": '{"_type": "Int4Tensor", "_data": {}}'}, {}, r"is part of torchao's Int4Tensor", False),
        (
            {"m.weight": '{"_type": "Int8Tensor", "_data": {"block_size": [1, 96]}}'},
            {},
            r"is F8_E4M3; lora-tool reads I8",
            False,
        ),
        (
            {"m.weight": '{"_type": "Float8Tensor", "_data": {"block_size": [1, 95]}}'},
            {},
            r"blocks of \[1, 95\] do not fill",
            True,
        ),
        (
            {"m.weight": '{"_type": "Float8Tensor", "_data": {"block_size": [1, 32]}}'},
            {},
            r"expected \[32, 3\]",
            True,
        ),
        (None, {"m___weight_scale": None}, r"its other part `m._weight_scale` is missing", True),
        (None, {"m___weight_qdata": None}, r"`m._weight_scale` is a part of a quantised weight", True),
    ],
)
def test_what_torchao_does_not_say_is_named(
    said: dict[str, str] | None, changes: dict[str, Any], words: str, *, is_fault: bool
) -> None:
    sample = "torchao-own-fp8-row"
    own = {"m.weight": SAMPLES.metadata[f"{sample}|m.weight"]} if said is None else said
    with pytest.raises(LayoutError, match=words) as error:
        read_quantised(changed(sample, **changes), config_of(sample), own)
    assert error.value.is_fault == is_fault


def test_scales_in_the_order_of_a_kernel_are_refused() -> None:
    own = json.loads(SAMPLES.metadata["torchao-own-mxfp8|m.weight"])
    own["_data"]["is_swizzled_scales"] = True
    with pytest.raises(LayoutError, match=r"has scales in the order of a GPU's kernel") as error:
        read_quantised(stored("torchao-own-mxfp8"), {"quant_method": "torchao"}, {"m.weight": json.dumps(own)})
    assert not error.value.is_fault


def test_a_state_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    name = "m.weight.quant_state.bitsandbytes__nf4"
    save_file({name: np.frombuffer(b"[" * 50_000, np.uint8)}, tmp_path / "w.safetensors")
    with pytest.raises(LayoutError, match="holds no JSON object"):
        read_quantised(scan_file(tmp_path / "w.safetensors").tensors, {"quant_method": "bitsandbytes"})


def test_blocks_are_said_as_text_by_older_files() -> None:
    said = config_of("fp8-block")
    weights = said["config_groups"]["group_0"]["weights"]
    assert weights["block_structure"] == [16, 32]
    weights = {**weights, "block_structure": "16x32"}
    found = read_quantised(stored("fp8-block"), {**said, "config_groups": {"group_0": {"weights": weights}}})
    assert found.weights["m.weight"] == encoding_in("fp8-block")


def test_gptq_has_modules_of_other_bits() -> None:
    said = config_of("gptq-8")
    found = read_quantised(stored("gptq-8"), {**said, "bits": 4, "dynamic": {r"+:.*down.*": {"bits": 8}, "-:.*": {}}})
    assert found.weights["m.weight"] == encoding_in("gptq-8")


def test_six_bits_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"holds floats of six bits \(mxfp6\)") as error:
        read_quantised(changed("mxfp4", m__weight_packed=(DType.U8, (20, 72))), config_of("mxfp4"))
    assert not error.value.is_fault


def test_bytes_of_which_the_config_says_that_they_hold_four_bits_are_only_read() -> None:
    """compressed-tensors stores the weights of W4A8 as int8: codes of eight bits would be cut off by who reads four."""
    said = config_of("int8-channel")
    weights = {**said["config_groups"]["group_0"]["weights"], "num_bits": 4}
    found = read_quantised(stored("int8-channel"), {**said, "config_groups": {"group_0": {"weights": weights}}})
    four, eight = found.weights["m.weight"], encoding_in("int8-channel")
    assert (str(four), str(eight)) == ("int4 per row", "int8 per row")
    assert not is_requantisable(four)
    assert is_requantisable(eight)
    words = {"weights": weights, "format": "pack-quantized"}
    beside = read_quantised(
        stored("int8-channel"), {**said, "config_groups": {**said["config_groups"], "other": words}}
    )
    assert beside.weights["m.weight"] == eight
    assert read_part(dequantised(four), 0, 96) == read_part(dequantised(eight), 0, 96)


@pytest.mark.parametrize("offset", ["1e39", "NaN", "1" + "0" * 400])
def test_a_mean_of_scales_that_is_no_float32_is_named(offset: str, tmp_path: Path) -> None:
    name, found = "m.weight.quant_state.bitsandbytes__nf4", stored("bnb-nf4-double@bfloat16-12x64")
    said = json.loads(read_part(found[name], 0, found[name].nbytes))
    text = json.dumps({**said, "nested_offset": "HERE"}).replace('"HERE"', offset)
    save_file({name: np.frombuffer(text.encode(), np.uint8)}, tmp_path / "w.safetensors")
    found |= scan_file(tmp_path / "w.safetensors").tensors
    with pytest.raises(LayoutError, match="does not give nested_blocksize and nested_offset"):
        read_quantised(found, {"quant_method": "bitsandbytes"})
