"""Weight files whose header lies about size, order, names, or whose data was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_tool.core.errors import CorruptFile, Defect
from lora_tool.formats.safetensors import MAX_HEADER_BYTES, scan_file
from tests.headers import read_file
from tests.hostile.folders import assert_refused, copy_pair

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def write(path: Path, header: object, data: bytes = bytes(16), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


HEADERS: dict[str, tuple[object, Defect]] = {
    "no object": ([], Defect.BAD_HEADER),
    "no json": (b"{'a': 1}", Defect.BAD_HEADER),
    "no utf-8": (b'{"\xff": 1}', Defect.BAD_HEADER),
    "empty": (b"", Defect.BAD_HEADER),
    "deep": (b'{"a":' + b"[" * 100_000, Defect.BAD_HEADER),
    "duplicate tensor": (
        b'{"a":' + json.dumps(F32).encode() + b',"a":' + json.dumps(F32).encode() + b"}",
        Defect.DUPLICATE_KEY,
    ),
    "duplicate field": (b'{"a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}', Defect.DUPLICATE_KEY),
    "metadata no text": ({"__metadata__": {"a": 1}, "a": F32}, Defect.BAD_HEADER),
    "entry no object": ({"a": 1}, Defect.BAD_HEADER),
    "unknown dtype": ({"a": {**F32, "dtype": "F31"}}, Defect.BAD_HEADER),
    "dtype no text": ({"a": {**F32, "dtype": ["F32"]}}, Defect.BAD_HEADER),
    "negative size": ({"a": {**F32, "shape": [-2, -2]}}, Defect.BAD_HEADER),
    "fractional size": ({"a": {**F32, "shape": [2.0, 2]}}, Defect.BAD_HEADER),
    "true as a size": ({"a": {**F32, "shape": [True, 4]}}, Defect.BAD_HEADER),
    "overflowing shape": ({"a": {**F32, "shape": [2**40, 2**40]}}, Defect.BAD_HEADER),
    "overflow hidden by a zero": (
        {"a": {**F32, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}},
        Defect.BAD_HEADER,
    ),
    "size of 5,000 digits": (
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}',
        Defect.BAD_HEADER,
    ),
    "half a byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 16]}}, Defect.BAD_HEADER),
    "three offsets": ({"a": {**F32, "data_offsets": [0, 8, 16]}}, Defect.BAD_HEADER),
    "offsets backwards": ({"a": {**F32, "data_offsets": [16, 0]}}, Defect.BAD_HEADER),
    "offsets beyond the file": ({"a": {**F32, "data_offsets": [0, 17]}}, Defect.TRUNCATED),
    "offsets of 63 bits": ({"a": {**F32, "data_offsets": [2**63 - 17, 2**63 - 1]}}, Defect.TRUNCATED),
    "wrong size": ({"a": {**F32, "shape": [2, 1]}}, Defect.WRONG_SIZE),
    "hole before": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, Defect.HOLE),
    "hole after": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, Defect.HOLE),
    "no tensor for the data": ({}, Defect.HOLE),
    "overlap": ({"a": F32, "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, Defect.OVERLAP),
    "same place twice": ({"a": F32, "b": F32}, Defect.OVERLAP),
}


@pytest.mark.parametrize(("header", "defect"), HEADERS.values(), ids=HEADERS)
def test_a_bad_header_is_one_named_defect(header: object, defect: Defect, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", header)
    assert defect in {problem.defect for problem in scan_file(path).problems}
    with pytest.raises(CorruptFile, match="x.safetensors"):
        read_file(path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_length_is_not_believed(length: int, tmp_path: Path) -> None:
    (problem,) = scan_file(write(tmp_path / "x", {"a": F32}, length=length)).problems
    assert problem.defect is Defect.BAD_HEADER
    assert f"{MAX_HEADER_BYTES:,}" in problem.message


def test_a_sparse_file_of_the_largest_header_is_no_memory_bomb(tmp_path: Path) -> None:
    path = write(tmp_path / "x", b"", b"", length=MAX_HEADER_BYTES)
    with path.open("r+b") as file:
        file.truncate(8 + MAX_HEADER_BYTES)
    (problem,) = scan_file(path).problems
    assert problem.defect is Defect.BAD_HEADER


@pytest.mark.parametrize("which", ["adapter/adapter_model.safetensors", "base/model-00002-of-00002.safetensors"])
def test_truncation_at_every_byte_that_matters_is_seen(which: str, tmp_path: Path) -> None:
    path = copy_pair(tmp_path).base.parent / which
    whole = path.read_bytes()
    file = read_file(path)
    ends = [tensor.spans[0].offset + tensor.nbytes for tensor in file.tensors.values()]
    edges = {0, 1, 7, 8, 9, file.data_start - 1, file.data_start, *ends}
    for size in sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 <= near < len(whole)}):
        path.write_bytes(whole[:size])
        problems = scan_file(path).problems
        assert {problem.defect for problem in problems} & {Defect.TRUNCATED, Defect.BAD_HEADER}, size
    path.write_bytes(whole + b"\0")
    assert {problem.defect for problem in scan_file(path).problems} == {Defect.HOLE}


@pytest.mark.parametrize("keep", [0, 8, 100, -1])
def test_the_command_refuses_a_truncated_file(keep: int, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = pair.base / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(pair, str(path), "byte")


def changed_header(path: Path, **changes: Any) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = {**json.loads(raw[8 : 8 + length]), **changes}
    write(path, header, raw[8 + length :])


def test_the_command_names_tensor_expected_and_found(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = pair.adapter / "adapter_model.safetensors"
    (name, tensor), *_ = read_file(path).tensors.items()
    start = tensor.spans[0].offset - read_file(path).data_start
    entry = {"dtype": tensor.dtype.value, "shape": [3, 5], "data_offsets": [start, start + tensor.nbytes]}
    changed_header(path, **{name: entry})
    assert_refused(pair, str(path), name, "needs", f"{tensor.nbytes:,}")
