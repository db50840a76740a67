"""A disk that fills up while we write: a tmpfs of the wrong size where one can be mounted, else a pwrite that fails."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from lora_tool.core.errors import ExecutionError, OutOfSpace
from lora_tool.execution import engine, output
from lora_tool.execution.engine import execute
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from tests.hostile.folders import Pair, copy_pair
from tests.hostile.test_output import plan_of


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB, less than a merged fixture needs."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("precision", ["float32", "peft"])
def test_a_disk_that_fills_up_keeps_nothing(
    precision: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    pair = copy_pair(tmp_path / "in")
    monkeypatch.setattr(engine, "check_space", lambda *_: None)  # another program took the space after we looked
    with pytest.raises(OutOfSpace, match="the disk is full"):
        execute(plan_of_precision(pair, precision), small_disk / "out")
    assert list(small_disk.iterdir()) == []


def plan_of_precision(pair: Pair, precision: str) -> Plan:
    return replace(plan_of(pair), precision=Precision(precision))


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, OutOfSpace), (errno.EDQUOT, OutOfSpace), (errno.EIO, ExecutionError)]
)
def test_a_write_that_fails_keeps_nothing(
    number: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = copy_pair(tmp_path)

    def pwrite(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(error):
        execute(plan_of(pair), pair.out)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_the_place_says_so_before_anything_is_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = copy_pair(tmp_path)
    monkeypatch.setattr(output, "_fallocate", lambda: failing(number))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("something was written"))
    with pytest.raises(OutOfSpace, match="the disk is full"):
        execute(plan_of(pair), pair.out)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.parametrize("offered", [None, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_system_that_cannot_reserve_the_place_writes_the_same(
    offered: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = copy_pair(tmp_path)
    execute(plan_of(pair), tmp_path / "reserved")
    monkeypatch.setattr(output, "_fallocate", lambda: None if offered is None else failing(offered))
    execute(plan_of(pair), pair.out)
    for path in (tmp_path / "reserved").glob("*.safetensors"):
        assert (pair.out / path.name).read_bytes() == path.read_bytes()


def failing(number: int) -> Callable[..., int]:
    """Return a call of C that fails."""

    def call(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    return call
