"""Torch files made to harm: none of them runs code, changes the reader, or is believed about a size."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool.core.errors import CorruptFile, UnsupportedCheckpoint
from lora_tool.core.tensors import DType
from lora_tool.formats.dcp import read_dcp
from lora_tool.formats.distributed_tensors import KNOWN
from lora_tool.formats.rank_files import RankFolder, read_rank_files
from lora_tool.formats.torch_zip import read_torch_file
from tests.hostile.test_rank_files import repickled

STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
"""The pickle of the storage `data/0` of four floats."""


class Bomb:
    """Runs a command when it is unpickled in the ordinary way."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def write(path: Path, pickled: bytes, *, compress: int = zipfile.ZIP_STORED, extra: tuple[str, ...] = ()) -> Path:
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("file/data.pkl", pickled)
        archive.writestr("file/data/0", bytes(16))
        for name in extra:
            archive.writestr(name, b"x")
    return path


def tensor(start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    sizes = [pickle.dumps(sizes, 2)[2:-1] for sizes in (shape, stride)]
    number = pickle.dumps(start, 2)[2:-1]
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
    return b"\x80\x02" + rebuild + STORAGE + number + sizes[0] + sizes[1] + b"\x89NtR."


def test_a_command_in_the_pickle_is_read_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"weights": torch.ones(2), "bomb": Bomb(f"touch {mark}")}, tmp_path / "file.pt")
    value = read_torch_file(tmp_path / "file.pt").value
    assert value["bomb"].args == (f"touch {mark}",)
    assert value["weights"].shape == (2,)
    assert not mark.exists()
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert mark.exists(), "the bomb was a dud, so the test showed nothing"


BUILDS = {
    "the reader of tensors": (b"ctorch._utils\n_rebuild_tensor_v2\n", ("build", print)),
    "an element type": (b"ctorch\nfloat32\n", ("_value_", "BF16")),
    "a stub class": (b"cos\nsystem\n", ("__call__", print)),
    "a built-in type": (b"ccollections\nOrderedDict\n", ("update", print)),
    "a lazy tensor": (tensor(0, (4,), (1,))[2:-1], ("record", "elsewhere")),
}


@pytest.mark.parametrize("what", BUILDS)
@pytest.mark.parametrize("slots", [False, True])
def test_build_changes_nothing_but_stubs(tmp_path: Path, what: str, *, slots: bool) -> None:
    pushed, (name, _) = BUILDS[what]
    state = pickle.dumps((None, {name: 1}) if slots else {name: 1}, 2)[2:-1]
    path = write(tmp_path / "file.pt", b"\x80\x02" + pushed + state + b"b.")
    before = dict(KNOWN), DType.F32.value
    with pytest.raises(CorruptFile):
        read_torch_file(path)
    assert (dict(KNOWN), DType.F32.value) == before


@pytest.mark.parametrize(
    ("start", "shape", "stride"),
    [
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (0, (2, 2), (3, 1)),
        (5, (0,), (1,)),
        (0, (2**40, 2**40), (0, 0)),
        (-1, (2,), (1,)),
        (0, (-1,), (1,)),
        (0, (2,), (1, 1)),
    ],
)
def test_a_tensor_beyond_its_storage_is_refused(
    tmp_path: Path, start: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    with pytest.raises(CorruptFile):
        read_torch_file(write(tmp_path / "file.pt", tensor(start, shape, stride)))


def test_the_same_tensor_inside_its_storage_is_read(tmp_path: Path) -> None:
    assert read_torch_file(write(tmp_path / "file.pt", tensor(1, (3,), (1,)))).value.shape == (3,)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_local_headers(data: bytes) -> bytes:
    return data.replace(b"PK\x03\x04", b"PK\x00\x00")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut,
    "empty": lambda _: b"",
    "no local headers": without_local_headers,
    "text": lambda _: b"hello, world " * 10,
    "bare pickle": lambda _: pickle.dumps({"a": 1}),
    "only the end": lambda data: data[-22:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rank.pt"
    torch.save({"x": torch.ones(100)}, path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(CorruptFile, match=r"rank\.pt"):
        read_torch_file(path)


def test_the_legacy_format_is_refused_by_name(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptFile, match=r"before 1\.6"):
        read_torch_file(tmp_path / "old.pt")


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="compressed"):
        read_torch_file(write(tmp_path / "bomb.pt", b"N" * 10_000 + b".", compress=zipfile.ZIP_DEFLATED))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match="two members"):
        read_torch_file(write(tmp_path / "file.pt", b"\x80\x02N.", extra=("file/data/0",)))


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02]r\xff\xff\xff\x7f.",  # LONG_BINPUT that would reserve 32 GB
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # a string beyond the end
        b"\x80\x02",
        b"\x80\x02cos\n",
        b"cos\nsystem\n(S'true'\ntR.",  # protocol 0
        b"\x80\x02R.",
    ],
)
def test_broken_pickles_are_refused(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(CorruptFile, match="pickle"):
        read_torch_file(write(tmp_path / "file.pt", pickled))


def doubled(times: int, both: Callable[[bytes], bytes]) -> bytes:
    """Return instructions that leave an object with 2^`times` parts on the stack; `both` makes one of two equal ones."""
    program = b"K\x01\x85q\x000"
    for at in range(times):
        program += both(b"h%c" % at) + b"q%c0" % (at + 1)
    return program + b"h%c" % times


TUPLE = doubled(60, lambda one: one + one + b"\x86")
BOMBS = {
    "a tuple": TUPLE + b".",
    "a list": doubled(60, lambda one: b"](" + one + one + b"e") + b".",
    "a dictionary": doubled(60, lambda one: b"}(K\x01" + one + b"K\x02" + one + b"u") + b".",
    "a key, which would be hashed for ever": b"}" + TUPLE + b"Ns.",
    "two equal keys, which would be compared for ever": b"}(" + TUPLE + b"N" + TUPLE + b"Nu.",
    "an element of a set": b"c__builtin__\nset\n](" + TUPLE + b"e\x85R.",
    "an element of a frozen set": b"(" + TUPLE + b"\x91.",
    "a key of an ordered dictionary": b"ccollections\nOrderedDict\n](" + TUPLE + b"N\x86e\x85R.",
    "an unknown object": b"cfoo\nBar\n" + TUPLE + b"\x85\x81.",
    "the state of an unknown object": b"cfoo\nBar\n)\x81" + TUPLE + b"b.",
    "a persistent id": TUPLE + b"Q.",
    "a persistent id of five": b"(" + TUPLE + b"NNNNtQ.",
    "a size": b"ctorch\nSize\n" + TUPLE + b"\x85R.",
    "a tensor's arguments": b"ctorch._utils\n_rebuild_tensor_v2\n(" + TUPLE + b"NNNtR.",
    "a parameter": b"}ctorch._utils\n_rebuild_parameter\n" + TUPLE + b"\x85RNs.",
    "a deep key, whose hash would need all of the stack": b"}K\x01" + b"\x85" * 100_000 + b"Ns.",
    "a deep list": b"]" * 300 + b"a" * 299 + b".",
    "many marks": b"(" * 100_000 + b".",
    "a number of a megabyte as a key": b"}\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b"Ns.",
    "numbers with one hash": b"}("
    + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(1, 20_000))
    + b"u.",
    "many classes": b"".join(b"ca\nb%d\n0" % n for n in range(20_000)) + b"N.",
    "one long list, made a set again and again": b"c__builtin__\nset\nq\x000]("
    + b"K\x01" * 20_000
    + b"e\x85q\x010"
    + b"h\x00h\x01R0" * 9_000
    + b".",
    "duplicates": b"K\x01" + b"2" * 9 + b"\x86" * 9 + b".",
}


@pytest.mark.parametrize("what", BOMBS)
def test_bombs_are_refused_at_once(tmp_path: Path, what: str) -> None:
    start = time.process_time()
    with pytest.raises(CorruptFile, match="pickle"):
        read_torch_file(write(tmp_path / "file.pt", b"\x80\x02" + BOMBS[what]))
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + BOMBS[what])
    with pytest.raises(CorruptFile, match="pickle"):
        read_dcp(tmp_path)
    assert time.process_time() - start < 10


def test_what_two_objects_share_is_no_bomb(tmp_path: Path) -> None:
    betas, shape = (0.9, 0.999), torch.Size((3, 4))
    value = {
        "param_groups": [{"betas": betas, "params": [at]} for at in range(1000)],
        "shapes": {f"layer.{at}": shape for at in range(1000)},
        (1, ("a", 2)): {3, "x"},
        2**40: frozenset({"y"}),
    }
    torch.save(value, tmp_path / "file.pt")
    assert read_torch_file(tmp_path / "file.pt").value == value


def test_a_record_whose_size_is_a_lie_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save(torch.ones(64), path)
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data[:-4] if "/data/0" in info.filename else data)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CorruptFile, match="should be 64"):
        read_torch_file(path)


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank.pt")
    with pytest.raises(CorruptFile, match="regular"):
        read_torch_file(tmp_path / "rank.pt")


RANK_FILES = Path(__file__).parents[1] / "rank_files"


@pytest.mark.parametrize("name", ["dtensor_hsdp.pt", "dtensor_over_tp.pt", "sharded_tensor.bin"])
def test_the_classes_of_distributed_tensors_are_names_alone(name: str) -> None:
    """Nothing of torch is imported for them, and every part says where it lies."""
    script = (
        "import sys; from pathlib import Path; from lora_tool.formats.torch_zip import read_torch_file\n"
        "held = read_torch_file(Path(sys.argv[1])).value\n"
        "assert held and all(part.offsets for tensor in held.values() for part in tensor.parts)\n"
        "assert any(tensor.parts for tensor in held.values()) and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(RANK_FILES / name)], check=True)


def globals_of(path: Path) -> list[tuple[str, str]]:
    """Return the file and each name in its pickle."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    names = dict.fromkeys(str(arg) for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL")
    return [(path.name, name) for name in names]


def places(found: RankFolder) -> dict[str, tuple[object, ...]]:
    return {name: (each.dtype, each.shape, [part.place for part in each.parts]) for name, each in found.tensors.items()}


@pytest.mark.parametrize(("file", "name"), [each for path in sorted(RANK_FILES.iterdir()) for each in globals_of(path)])
def test_no_other_name_is_taken_for_one_of_a_distributed_tensors(file: str, name: str, tmp_path: Path) -> None:
    """Each name in a real rank file in turn becomes that of a harmful function: refused by that name, or of no meaning."""
    path = Path(shutil.copy(RANK_FILES / file, tmp_path / "rank_0.pt"))
    good = places(read_rank_files(tmp_path, {0: path}))
    module, attribute = name.split(" ")
    old = f"c{module}\n{attribute}\n".encode()
    repickled(path, lambda pickled: pickled.replace(old, b"cos\nsystem\n"))
    try:
        found = read_rank_files(tmp_path, {0: path})
    except UnsupportedCheckpoint as error:
        said = str(error)
    else:
        said = " ".join(map(str, found.problems))
        assert said or places(found) == good
    assert "system" in said or not said, said


@pytest.mark.parametrize(
    "pickled",
    [
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nNX\x02\x00\x00\x00ls\x85NtR.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\nN(cao\nNF4Tensor\nN)tNtR.",
    ],
    ids=["another function", "another subclass"],
)
def test_no_other_class_is_taken(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(CorruptFile):
        read_torch_file(write(tmp_path / "file.pt", b"\x80\x02" + pickled))


@pytest.mark.parametrize(
    "built",
    [
        b"ctorch._utils\n_rebuild_sparse_tensor\n)R",
        b"cnumpy._core.multiarray\n_reconstruct\n)R",
        b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R",
        b"cos\nsystem\n",
    ],
    ids=["a sparse tensor", "an array", "a command", "a function"],
)
def test_what_stands_for_a_parameter_and_is_no_tensor_is_never_left_out(tmp_path: Path, built: bytes) -> None:
    name = b"X\x08\x00\x00\x00a.weight"
    path = write(tmp_path / "rank_0.pt", b"\x80\x02}" + name + built + b"s.")
    with pytest.raises(UnsupportedCheckpoint, match=r"`a\.weight` is made by (torch|numpy|os)\."):
        read_rank_files(tmp_path, {0: path})
