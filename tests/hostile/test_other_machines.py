"""The same bytes, or one clear error, on systems that have fewer calls, give less than was asked, or fail midway."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lora_tool.core.machine
from lora_tool.core.errors import OutputExists
from lora_tool.execution import in_memory
from lora_tool.execution.folder import check_output
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
    assert found.err.startswith(
        ("error: lora-tool does not run on big-endian ", "error: lora-tool does not run natively on ")
    )
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


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Files and folders that this user may not open: root, as whom tests may run, may open anything."""
    paths: set[Path] = set()

    def may(path: object) -> bool:
        named = Path(os.fsdecode(path)).absolute() if isinstance(path, str | bytes | os.PathLike) else Path()
        return named not in paths and not any(above in paths for above in named.parents)

    def refusing(system: Callable[..., Any]) -> Callable[..., Any]:
        def call_of_system(path: object, *args: object, **more: object) -> Any:
            if not may(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return system(path, *args, **more)

        return call_of_system

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *args: may(path) and access(path, *args))
    return paths


def test_a_config_that_may_not_be_read_is_not_one_that_says_nothing(
    call: Caller, tmp_path: Path, forbidden: set[Path]
) -> None:
    adapter = shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "adapter")
    forbidden.add(adapter / "adapter_config.json")
    found = call("merge", "--rm", adapter, "-o", tmp_path / "out")
    assert found.code == 1, found.err
    assert "LT112  cannot be opened: Permission denied" in found.err


@pytest.mark.parametrize("what", ["", "adapter_model.safetensors"])
def test_a_checkpoint_that_may_not_be_read_is_listed_and_not_pruned(
    what: str, call: Caller, tmp_path: Path, forbidden: set[Path]
) -> None:
    run = shutil.copytree(FIXTURES / "reward-run", tmp_path / "run")
    forbidden.add(run / "checkpoint-2" / what)
    assert "checkpoint-2" in call("ls", tmp_path).out
    pruned = call("prune", run, "--keep-last", "1", "--keep-best", "0", "--apply")
    assert pruned.code == 0
    assert "you may not read it, so prune cannot tell whether it is broken" in pruned.out
    assert (run / "checkpoint-2").is_dir()


def test_a_folder_of_ranks_that_may_not_be_read_is_named(call: Caller, tmp_path: Path, forbidden: set[Path]) -> None:
    run = shutil.copytree(FIXTURES / "zero" / "stage3-reward", tmp_path / "run")
    forbidden.add(run / "global_step2")
    found = call("consolidate", run, "-o", tmp_path / "out")
    assert found.code == 3
    assert f"{run / 'global_step2'} cannot be listed: Permission denied" in found.err


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_the_umask_says_who_may_use_the_output(mask: int, call: Caller, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        assert call(*COMMANDS["merge"], "-o", tmp_path / "out").code == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_limit_of_memory_or_threads_is_one_error(
    error: Exception, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", start)
    found = call(*COMMANDS["merge"], "-o", tmp_path / "out")
    assert found.code == 3
    assert len(found.err.splitlines()) == 2
    assert "--jobs 1" in found.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_takes_nothing_changes_no_exit_code(stream: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run(
            [sys.executable, "-m", "lora_tool", "validate", "nowhere", "--json"], check=False, **streams
        )
    assert done.returncode == 3
    assert b"Traceback" not in (done.stderr or b"")


def test_the_pages_of_the_rules_do_not_need_docstrings(call: Caller) -> None:
    words = [sys.executable, "-OO", "-m", "lora_tool", "rules", "LT206"]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert found == call("rules", "LT206").out


def test_an_output_that_is_a_link_is_written_where_it_leads(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "disk" / "model")
    for more in ([], ["--overwrite"]):
        assert call(*COMMANDS["merge"], "-o", out, *more).code == 0
        assert out.is_symlink()
        assert (out / "lora_tool.json").is_file()
        assert {path.name for path in tmp_path.rglob("*") if path.name.startswith(".")} == set()


@pytest.mark.parametrize("out", [".", "", "../here"])
def test_the_working_directory_is_refused_before_the_work(
    out: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = call(*COMMANDS["merge"], "-o", out)
    assert found.code == 6
    assert "is the working directory" in found.err
    found = call("ci", *COMMANDS["merge"][1:], "-o", out)
    assert found.code == 6
    assert "is the working directory" in found.out


def test_home_is_put_in_where_no_shell_does(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call(*COMMANDS["merge"], "--output=~/out").code == 0
    assert call("verify", "~/out", "--report", "json=~/report.json").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out", "report.json"}


def test_an_input_under_another_name_is_not_overwritten(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "adapter"
    assert call(*COMMANDS["dcp"], "-o", adapter).code == 0
    (tmp_path / "ADAPTER").symlink_to(adapter)  # as if letters' case were no difference, or a mount were bound
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    with pytest.raises(OutputExists, match="is the input .*adapter"):
        check_output(tmp_path / "ADAPTER", overwrite=True, inputs=(adapter,))


def test_a_reader_that_leaves_is_no_finding(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lora_tool", *map(str, COMMANDS["merge"]), "-o", str(tmp_path / "out"), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 141
    assert (tmp_path / "out" / "lora_tool.json").is_file()


@pytest.mark.parametrize(("before", "after"), [(signal.SIG_DFL, 130), (signal.SIG_IGN, 0)])
def test_a_terminal_that_is_closed_interrupts_unless_that_is_ignored(before: Any, after: int, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from lora_tool.cli.main import main\n"
        "from lora_tool.execution import engine\n"
        f"signal.signal(signal.SIGHUP, signal.{before.name})\n"
        "write = engine._write_side_file\n"
        "engine._write_side_file = lambda *args: (os.kill(os.getpid(), signal.SIGHUP), write(*args))\n"
        "main(sys.argv[1:])\n"
    )
    words = [sys.executable, "-c", program, *map(str, COMMANDS["merge"]), "-o", str(tmp_path / "out")]
    assert subprocess.run(words, capture_output=True, check=False).returncode == after
    assert [path.name for path in tmp_path.iterdir()] == ([] if after else ["out"])


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu.max": "?"}, 64),
        ({}, 64),
    ],
)
def test_a_container_has_the_cores_it_was_given(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(files, tmp_path)
    monkeypatch.setattr(lora_tool.core.machine, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert lora_tool.core.machine.available_cores() == cores


def given(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="ascii")


def test_what_a_container_keeps_of_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "anon 300\nfile 650\nshmem 50\ninactive_file 400\nactive_file 200\n"
    given({"memory.max": "1000\n", "memory.current": "950\n", "memory.stat": stat}, tmp_path)
    monkeypatch.setattr(in_memory, "CONTROL_GROUP", tmp_path)
    assert in_memory.available_bytes() == 650


@pytest.mark.parametrize(("total", "code"), [(0, 0), (1000, 3)])
def test_a_disk_that_tells_no_size_is_written_to(
    total: int, code: int, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=total, used=0, free=0))
    assert call(*COMMANDS["merge"], "-o", tmp_path / "out").code == code
