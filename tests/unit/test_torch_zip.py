"""Torch files read without torch: structure, places, and the same bytes that torch gave them."""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lora_tool.errors import CorruptFile
from lora_tool.formats.pickles import Stub
from lora_tool.formats.torch_zip import LazyTensor, read_torch_file
from lora_tool.tensors import DType

DTYPES = {
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int64: DType.I64,
    torch.uint8: DType.U8,
    torch.bool: DType.BOOL,
    torch.uint16: DType.U16,
    torch.float8_e4m3fn: DType.F8_E4M3,
}


def raw(tensor: LazyTensor) -> bytes:
    stored = tensor.stored("x")
    (span,) = stored.spans
    with span.path.open("rb") as file:
        return os.pread(file.fileno(), span.nbytes, span.offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_found_with_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    torch.save({"deep": [{"x": tensor}]}, tmp_path / "file.pt")
    read = read_torch_file(tmp_path / "file.pt").value["deep"][0]["x"]
    assert (read.dtype, read.shape) == (DTYPES[dtype], (3, 5))
    assert raw(read) == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_view_is_read_at_its_place(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    torch.save([whole[4:10].view(2, 3)], tmp_path / "file.pt")
    (read,) = read_torch_file(tmp_path / "file.pt").value
    assert raw(read) == whole[4:10].numpy().tobytes()


def test_an_archive_inside_a_file_is_read(tmp_path: Path) -> None:
    torch.save(torch.arange(7), tmp_path / "inner.pt")
    inner = (tmp_path / "inner.pt").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 100 + inner + b"y" * 33)
    read = read_torch_file(tmp_path / "outer", offset=100, nbytes=len(inner)).value
    assert raw(read) == torch.arange(7).numpy().tobytes()


def test_a_transposed_tensor_is_refused_when_it_is_wanted(tmp_path: Path) -> None:
    torch.save(torch.ones(3, 4).T, tmp_path / "file.pt")
    read = read_torch_file(tmp_path / "file.pt").value
    with pytest.raises(CorruptFile, match="strides"):
        read.stored("x")


def test_unknown_classes_become_stubs(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=0.5), "keys": OrderedDict(a=1), "set": {1, 2}}, tmp_path / "file.pt")
    value = read_torch_file(tmp_path / "file.pt").value
    assert isinstance(value["args"], Stub)
    assert value["args"].get("lr") == 0.5
    assert value["keys"] == {"a": 1}
    assert value["set"] == {1, 2}


def test_the_archive_remembers_the_name_it_was_written_under(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "rank_0.pt")
    (tmp_path / "rank_0.pt").rename(tmp_path / "rank_1.pt")
    assert read_torch_file(tmp_path / "rank_1.pt").root == "rank_0"
