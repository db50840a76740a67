"""The same bytes, or one clear error, on systems that have fewer calls, give less than was asked, or fail midway."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import FIXTURES, Caller

ONLY_LINUX_HAS = ("copy_file_range", "posix_fadvise", "preadv", "sched_getaffinity")
COMMANDS = {
    "merge": ("merge", "--rm", FIXTURES / "reward-qwen2" / "adapter"),
    "consolidate": ("consolidate", FIXTURES / "zero" / "stage3-full"),
    "dcp": ("consolidate", FIXTURES / "fsdp2-reward"),
}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(capsys)


def _less(nbytes: int) -> int:
    return min(nbytes, max(1, nbytes // 3))


def give_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call move a third of what was asked, as network file systems may."""
    pread, preadv, pwrite = os.pread, getattr(os, "preadv", None), os.pwrite
    copy: Callable[..., int] | None = getattr(os, "copy_file_range", None)
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: pread(fd, _less(nbytes), at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[: _less(len(data))], at))
    if preadv is not None:

        def shorter(fd: int, buffers: Sequence[Any], at: int) -> Any:
            return preadv(fd, [memoryview(buffers[0])[: _less(len(buffers[0]))]], at)

        monkeypatch.setattr(os, "preadv", shorter)
    if copy is not None:
        monkeypatch.setattr(os, "copy_file_range", lambda a, b, count, *at: copy(a, b, _less(count), *at))


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lora_tool.json"}


@pytest.mark.parametrize("calls", ["all", "fewer"])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_system_lacks_or_gives_in_pieces_changes_no_byte(
    name: str, calls: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, found = tmp_path / "usual", tmp_path / "found"
    assert call(*COMMANDS[name], "-o", usual).code == 0
    with monkeypatch.context() as system:
        if calls == "fewer":
            for call_of_linux in ONLY_LINUX_HAS:
                system.delattr(os, call_of_linux, raising=False)
        give_less(system)
        assert call(*COMMANDS[name], "-o", found).code == 0
        assert call("validate", FIXTURES / "reward-qwen2" / "adapter", "--deep").code == 0
        assert call("verify", found).code == 0 if name == "merge" else True
    assert written(found) == written(usual)


@pytest.mark.parametrize("suffix", [".json", ".safetensors", ".pt"])
def test_a_file_that_cannot_be_read_is_named(
    suffix: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def call_of_system(fd: int, *args: object) -> Any:
            if os.path.realpath(f"/proc/self/fd/{fd}").endswith(suffix):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(fd, *args)

        return call_of_system

    for name in ("pread", "preadv", "copy_file_range"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    found = call(*COMMANDS["consolidate" if suffix == ".pt" else "merge"], "-o", tmp_path / "out")
    assert found.code == 3
    assert found.err.startswith("error: ")
    assert f"{suffix}: {os.strerror(errno.EIO)}" in found.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("what", "value"), [("byteorder", "big"), ("platform", "win32")])
def test_a_machine_of_another_kind_is_refused(
    what: str, value: str, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, what, value)
    found = call("inspect", FIXTURES / "reward-qwen2" / "adapter")
    assert found.code == 3
    assert found.err.startswith("error: lora-tool does not run on ")
    assert call("--version").code == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_to(
    number: int, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert call(*COMMANDS["merge"], "-o", tmp_path / "out").code == 0
    assert call("verify", tmp_path / "out").code == 0
    assert call(*COMMANDS["merge"], "-o", tmp_path / "out").code == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_an_image_that_can_be_removed_and_not_renamed_is_replaced(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    run = shutil.copytree(FIXTURES / "reward-run", tmp_path / "run")
    assert call(*COMMANDS["merge"], "-o", out).code == 0
    (out / "old").touch()

    def of_an_overlay(path: Path, target: Path) -> Path:
        if path in (out, run / "checkpoint-2"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", of_an_overlay)
    assert call(*COMMANDS["merge"], "-o", out, "--overwrite").code == 0
    assert not (out / "old").exists()
    assert call("verify", out).code == 0
    assert call("prune", run, "--keep-last", "1", "--keep-best", "0", "--apply").code == 0
    assert [path.name for path in run.iterdir()] == ["checkpoint-4"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run"}
