"""Torch files read without torch: structure, places, and the same bytes that torch gave them."""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lora_tool.core.errors import CorruptFile
from lora_tool.core.tensors import DType
from lora_tool.formats.pickle_objects import Stub
from lora_tool.formats.stored import read_part
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import PickleMemory, TorchFile, read_torch_file

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


def raw(file: TorchFile, tensor: LazyTensor) -> bytes:
    stored = file.stored(tensor, "x")
    (span,) = stored.spans
    return span.path.read_bytes()[span.offset : span.offset + span.nbytes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_found_with_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5).to(dtype)
    torch.save({"deep": [{"x": tensor}]}, tmp_path / "file.pt")
    file = read_torch_file(tmp_path / "file.pt")
    read = file.value["deep"][0]["x"]
    assert (read.dtype, read.shape) == (DTYPES[dtype], (3, 5))
    assert raw(file, read) == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_view_is_read_at_its_place(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    torch.save([whole[4:10].view(2, 3)], tmp_path / "file.pt")
    file = read_torch_file(tmp_path / "file.pt")
    assert raw(file, file.value[0]) == whole[4:10].numpy().tobytes()


def test_an_archive_inside_a_file_is_read(tmp_path: Path) -> None:
    torch.save(torch.arange(7), tmp_path / "inner.pt")
    inner = (tmp_path / "inner.pt").read_bytes()
    (tmp_path / "outer").write_bytes(b"x" * 100 + inner + b"y" * 33)
    file = read_torch_file(tmp_path / "outer", offset=100, nbytes=len(inner))
    assert raw(file, file.value) == torch.arange(7).numpy().tobytes()


def test_a_transposed_matrix_has_its_rows_and_other_strides_are_refused_when_they_are_wanted(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4).T
    torch.save([matrix, torch.ones(2, 3, 4).mT, torch.ones(8)[::2]], tmp_path / "file.pt")
    file = read_torch_file(tmp_path / "file.pt")
    transposed, *others = file.value
    stored = file.stored(transposed, "x")
    assert (stored.shape, read_part(stored, 0, stored.nbytes)) == ((4, 3), matrix.contiguous().numpy().tobytes())
    for other in others:
        with pytest.raises(CorruptFile, match="strides"):
            file.stored(other, "x")


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


def test_files_with_one_pickle_share_what_it_says_and_keep_their_bytes(tmp_path: Path) -> None:
    memory, files = PickleMemory(), []
    for rank in range(3):
        tensor = torch.full((4,), float(rank))
        path = tmp_path / f"{rank}.pt"
        torch.save({"x": tensor, "name": "y" if rank == 2 else "x"}, path)
        saved_on_gpu(path, rank)
        files.append(read_torch_file(path, memory=memory))
        assert raw(files[rank], files[rank].value["x"]) == tensor.numpy().tobytes()
    assert files[0].value is files[1].value
    assert files[2].value["name"] == "y"


def test_a_shared_pickle_is_held_against_each_file(tmp_path: Path) -> None:
    memory = PickleMemory()
    torch.save(torch.ones(4), tmp_path / "a.pt")
    read_torch_file(tmp_path / "a.pt", memory=memory)
    with zipfile.ZipFile(tmp_path / "a.pt") as good, zipfile.ZipFile(tmp_path / "b.pt", "w") as bad:
        for info in good.infolist():
            bad.writestr(info.filename, good.read(info)[:-4] if info.filename.endswith("/data/0") else good.read(info))
    with pytest.raises(CorruptFile, match="should be 4"):
        read_torch_file(tmp_path / "b.pt", memory=memory)


def saved_on_gpu(path: Path, rank: int) -> None:
    """Let the file say that its tensors were on the GPU number `rank`, as the files of a real run do."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(name, data.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:%d" % rank))


class Int8Tensor(torch.Tensor):
    """A weight as torchao pickles it: an object that is no tensor of torch's own."""

    __torch_dispatch__ = classmethod(lambda *_: None)  # type: ignore[assignment]


def test_weights_that_only_torchao_can_build_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("torchao.quantization")
    monkeypatch.setattr(Int8Tensor, "__module__", module.__name__)
    monkeypatch.setattr(module, "Int8Tensor", Int8Tensor, raising=False)
    for name in ("torchao", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    weight = torch.Tensor._make_wrapper_subclass(Int8Tensor, (2, 3), dtype=torch.bfloat16)
    torch.save({"m.weight": weight}, tmp_path / "pytorch_model.bin")
    words = r"of weights that torchao quantised \(torchao.quantization.Int8Tensor\).* save it again, which writes safetensors"
    with pytest.raises(CorruptFile, match=words):
        read_torch_file(tmp_path / "pytorch_model.bin")
