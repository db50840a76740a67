"""Folders that do not fit in memory are written past the page cache: the same bytes, whatever the file system offers."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tool.checkpoint import AdapterDir, open_checkpoint, open_model
from lora_tool.execution import local_engine, past_cache
from lora_tool.execution.engine import execute
from lora_tool.execution.output import write_exactly
from lora_tool.execution.past_cache import PastCache, exceeds_memory
from lora_tool.formats.room import PageBuffer
from lora_tool.machine import PAGE
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.merge.plan_merge import plan_merge
from tests.bench.models import Sizes, make_adapter, make_base

SIDES = Sizes(hidden=192, intermediate=1000, vocabulary=3001, heads=4, kv_heads=2)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """Return a folder on a file system that is written past the page cache, or skip."""
    tried = past_cache.past_cache(tmp_path / "tried", os.open(tmp_path / "tried", os.O_RDWR | os.O_CREAT))
    os.close(tried)
    if not isinstance(tried, PastCache):
        pytest.skip("pytest's folder is not on ext4 or XFS")
    os.close(tried.direct)
    return tmp_path


def written(path: Path, pieces: list[tuple[int, bytes]], *, alike: bool) -> int:
    """Write the pieces, from memory that lies like the file or not; return how many bytes went past the page cache."""
    room, past = PageBuffer(), 0
    descriptor = past_cache.past_cache(path, os.open(path, os.O_RDWR | os.O_CREAT))
    assert isinstance(descriptor, PastCache)
    for offset, data in pieces:
        place = room.like(offset + (0 if alike else 1), len(data))
        place[:] = data
        past += descriptor.write_pages(place, offset)
        write_exactly(descriptor, place, offset)
    os.fsync(descriptor)
    os.close(descriptor.direct)
    os.close(descriptor)
    return past


def test_pieces_of_any_size_at_any_place(on_disk: Path) -> None:
    chance = random.Random(7)
    data = chance.randbytes(400_000)
    cuts = sorted({0, len(data), *(chance.randrange(len(data)) for _ in range(20)), 3 * PAGE, 5 * PAGE, 5 * PAGE + 8})
    pieces = [(first, data[first:last]) for first, last in itertools.pairwise(cuts)]
    chance.shuffle(pieces)
    whole = sum(max(0, last // PAGE - -(-first // PAGE)) for first, last in itertools.pairwise(cuts)) * PAGE
    assert written(on_disk / "alike", pieces, alike=True) >= whole > len(data) // 2
    written(on_disk / "unlike", pieces, alike=False)
    assert (on_disk / "alike").read_bytes() == (on_disk / "unlike").read_bytes() == data


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("inputs")
    make_base(folder / "base", layers=1, shards=2, sizes=SIDES)
    make_adapter(folder / "adapter", layers=1, rank=8, sizes=SIDES)
    adapter = open_checkpoint(folder / "adapter")
    assert isinstance(adapter, AdapterDir)
    return plan_merge(open_model(folder / "base"), adapter)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def bytes_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every folder written past the page cache, and return a list of what went there."""
    counted: list[int] = []
    write_pages = PastCache.write_pages

    def counting(self: PastCache, data: memoryview, offset: int) -> int:
        counted.append(write_pages(self, data, offset))
        return counted[-1]

    monkeypatch.setattr(PastCache, "write_pages", counting)
    monkeypatch.setattr(local_engine, "exceeds_memory", lambda _: True)
    return counted


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_a_merge_has_the_same_bytes(plan: Plan, on_disk: Path, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setenv("LORA_TOOL_KERNEL", kernel)
    execute(plan, on_disk / "cached", jobs=2)
    past = bytes_past_the_cache(monkeypatch)
    execute(plan, on_disk / "past", jobs=2)
    assert content(on_disk / "past") == content(on_disk / "cached")
    assert sum(past) > 0.9 * plan.data_bytes


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC])
def test_what_does_not_go_past_the_cache_goes_through_it(
    plan: Plan, on_disk: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    execute(plan, on_disk / "cached", jobs=2)
    bytes_past_the_cache(monkeypatch)
    refused: list[int] = []
    pwrite = os.pwrite

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(number, os.strerror(number))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    execute(plan, on_disk / "past", jobs=1)
    assert refused
    assert content(on_disk / "past") == content(on_disk / "cached")


def no_flag(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)


def no_mounts(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(past_cache, "MOUNTS", folder / "absent")


def over_a_network(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    device = folder.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / {folder} rw,noatime master:1 - nfs4 server:/x rw\n"
    (folder / "mounts").write_text(line)
    monkeypatch.setattr(past_cache, "MOUNTS", folder / "mounts")


@pytest.mark.parametrize("lacking", [no_flag, no_mounts, over_a_network])
def test_elsewhere_all_goes_through_the_cache(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: Callable[[pytest.MonkeyPatch, Path], None]
) -> None:
    past = bytes_past_the_cache(monkeypatch)
    lacking(monkeypatch, tmp_path)
    execute(plan, tmp_path / "out", jobs=2)
    assert past == []
    assert sum(map(len, content(tmp_path / "out").values())) > plan.data_bytes


def test_what_fits_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(past_cache, "CONTROL_GROUP", tmp_path)
    assert not exceeds_memory(machine // 2)
    assert exceeds_memory(machine // 2 + 1)
    (tmp_path / "memory.max").write_text("max\n")
    assert not exceeds_memory(machine // 2)
    (tmp_path / "memory.max").write_text("1000000\n")
    assert exceeds_memory(500_001)
    assert not exceeds_memory(500_000)
