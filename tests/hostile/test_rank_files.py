"""Rank files and `.metadata` changed at random, and made to harm: findings or one clear error, never anything else."""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool.checkpoints import open_sharded
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report import Severity
from lora_tool.core.tensors import DType
from lora_tool.formats.dcp import Chunk, DcpTensor, uncovered
from lora_tool.formats.safetensors import build_header
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.core.plan import Plan
from lora_tool.verification.validating import validate
from tests.bench.zero_checkpoints import write

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def judge(folder: Path) -> None:
    """Ask for everything; whatever is raised must be one of our own errors, and what is planned can be written."""
    for ask in (lambda: validate(open_sharded(folder), deep=True), lambda: plan_consolidate(open_sharded(folder))):
        with contextlib.suppress(LoraToolError):
            found = ask()
            if isinstance(found, Plan):
                if found.values is not None:
                    found.values.run(lambda _: None)
                for shard in found.shards:
                    build_header([step.out for step in shard.steps], {})


def repickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle in a torch file, and leave the zip archive around it good."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


def with_noise(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 8))):
        changed[random_.randrange(len(changed))] = random_.choice((0, 1, 0x7F, 0xFF, random_.randrange(256)))
    return bytes(changed)


@pytest.mark.parametrize("name", [OPTIM, MODEL])
def test_noise_in_a_pickle(tmp_path: Path, name: str) -> None:
    random_ = random.Random(name)
    original = FIXTURES / "zero" / "stage3-reward"
    folder = Path(shutil.copytree(original, tmp_path / "run"))
    for _ in range(15):
        shutil.copy(original / "global_step2" / name, folder / "global_step2" / name)
        repickled(folder / "global_step2" / name, lambda data: with_noise(data, random_))
        judge(folder)


def test_noise_in_the_metadata(tmp_path: Path) -> None:
    random_ = random.Random(5)
    folder = Path(shutil.copytree(FIXTURES / "fsdp2-reward", tmp_path / "run"))
    (metadata,) = folder.rglob(".metadata")
    good = metadata.read_bytes()
    for _ in range(30):
        metadata.write_bytes(with_noise(good, random_))
        judge(folder)


def test_noise_in_a_whole_file(tmp_path: Path) -> None:
    random_ = random.Random(6)
    folder = Path(shutil.copytree(FIXTURES / "zero" / "stage2-tied", tmp_path / "run"))
    for path in sorted((folder / "global_step2").iterdir()):
        good = path.read_bytes()
        for _ in range(7):
            path.write_bytes(with_noise(good, random_))
            judge(folder)
        path.write_bytes(good)


Table = dict[str, Any]


def resave(path: Path, change: Callable[[Table], object]) -> None:
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def huge_shape(value: Table) -> None:
    group = value["param_shapes"][0]
    group[next(iter(group))] = torch.Size([2**40, 2**40])


def a_name_that_is_no_text(value: Table) -> None:
    value["param_shapes"] = [
        {"\udc80" + name: shape for name, shape in group.items()} for group in value["param_shapes"]
    ]


def a_loop_of_ties(value: Table) -> None:
    names = list(value["module"])
    value["shared_params"] = {names[0]: names[1], names[1]: names[0]}


MODEL_LIES: dict[str, Callable[[Table], object]] = {
    "a huge shape": huge_shape,
    "many groups": lambda value: value.update(param_shapes=value["param_shapes"] * 50),
    "no shapes": lambda value: value.update(param_shapes=None),
    "text for shapes": lambda value: value.update(param_shapes="many"),
    "names that are numbers": lambda value: value.update(module={1: torch.ones(2)}),
    "a name that is no text": a_name_that_is_no_text,
    "a name of the format": lambda value: value["module"].update(__metadata__=torch.ones(3)),
    "tensors that are text": lambda value: value.update(module=dict.fromkeys(value["module"], "weights")),
    "a huge world": lambda value: value.update(dp_world_size=10**18),
    "a loop of ties": a_loop_of_ties,
    "a tie to nothing": lambda value: value.update(shared_params={next(iter(value["module"])): "nowhere"}),
}


@pytest.mark.parametrize("lie", MODEL_LIES)
@pytest.mark.parametrize("name", ["stage2-tied", "stage3-reward"])
def test_model_files_that_lie(tmp_path: Path, name: str, lie: str) -> None:
    folder = Path(shutil.copytree(FIXTURES / "zero" / name, tmp_path / "run"))
    for path in (folder / "global_step2").glob("*model_states.pt"):
        resave(path, MODEL_LIES[lie])
    judge(folder)


def integers_for_groups(state: Table) -> None:
    state["fp32_flat_groups"] = [group.int() for group in state["fp32_flat_groups"]]


OPTIMIZER_LIES: dict[str, Callable[[Table], object]] = {
    "a huge partition count": lambda value: value["optimizer_state_dict"].update(partition_count=10**18),
    "no optimizer": lambda value: value.update(optimizer_state_dict=None),
    "matrices for groups": lambda value: value["optimizer_state_dict"].update(fp32_flat_groups=[torch.ones(2, 2)]),
    "integers for groups": lambda value: integers_for_groups(value["optimizer_state_dict"]),
}


@pytest.mark.parametrize("lie", OPTIMIZER_LIES)
def test_optimizer_files_that_lie(tmp_path: Path, lie: str) -> None:
    folder = tmp_path / "run"
    write(folder, {"model.norm.weight": (7, 3)}, {"model.embed.weight": (10,)}, ranks=2)
    assert validate(open_sharded(folder), deep=True).findings == ()
    for path in (folder / "global_step10").glob("*optim_states.pt"):
        resave(path, OPTIMIZER_LIES[lie])
    judge(folder)
    if lie != "a huge partition count":
        assert validate(open_sharded(folder)).worst is Severity.ERROR


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "zero" / "stage3-reward", tmp_path / "run"))
    path = folder / "global_step2" / OPTIM
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")
    assert {finding.code for finding in validate(open_sharded(folder)).findings} >= {"LT402"}


def test_parts_of_a_tensor_without_rows() -> None:
    whole = Chunk(offsets=(0, 0), sizes=(5, 4), filename="__0_0.distcp", at=0, nbytes=9)
    assert (
        uncovered(DcpTensor(dtype=DType.F32, shape=(0, 4), chunks=(whole,)))
        == "its parts have elements, but the tensor is empty"
    )
    assert uncovered(DcpTensor(dtype=DType.F32, shape=(5, 4), chunks=(whole,))) is None
    assert uncovered(DcpTensor(dtype=DType.F32, shape=(0, 4), chunks=())) is None
    assert uncovered(DcpTensor(dtype=DType.F32, shape=(4, 0), chunks=())) is None


def test_rows_that_are_in_no_file(tmp_path: Path) -> None:
    """The second chunk of a tensor is struck from `.metadata`, as an interrupted save leaves it."""
    folder = Path(shutil.copytree(FIXTURES / "fsdp2-full", tmp_path / "run"))
    (metadata,) = folder.rglob(".metadata")
    data = metadata.read_bytes()
    # a MetadataIndex holds the chunk's offset; another one there means that nothing is stored at the right one
    from lora_tool.formats.dcp import read_dcp

    found = read_dcp(metadata.parent)
    name, tensor = next(
        (name, one) for name, one in found.tensors.items() if len(one.chunks) > 1 and one.shape[0] < 255
    )
    offset = tensor.chunks[1].offsets[0]
    at = data.index(b"storage_data")
    place = data.index(
        b"K" + struct.pack("B", offset), data.index(name.encode(), at) if name.encode() in data[at:] else at
    )
    metadata.write_bytes(data[: place + 1] + b"\xfe" + data[place + 2 :])
    assert "LT408" in {finding.code for finding in validate(open_sharded(folder)).findings}
