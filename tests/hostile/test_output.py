"""What stands where the output would go, or comes to stand there, is never touched unasked."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tool import plan_merge
from lora_tool.checkpoints import MERGED_MODEL, AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import ExecutionError, OutOfSpace, OutputExists, SourceChanged
from lora_tool.execution.engine import execute
from lora_tool.plans.core.plan import Plan
from tests.hostile.folders import Pair, copy_pair, left_behind, lora_tool


def plan_of(pair: Pair) -> Plan:
    adapter = open_checkpoint(pair.adapter)
    assert isinstance(adapter, AdapterDir)
    return plan_merge(open_model(pair.base), adapter)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("options", [(), ("--overwrite",), ("--dry-run",)])
def test_a_folder_of_somebody_else_is_never_replaced(options: tuple[str, ...], tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    pair.out.mkdir()
    (pair.out / "thesis.txt").write_text("years of work")
    done = lora_tool(*pair.arguments, *options)
    assert done.code == 6
    assert str(pair.out) in done.err
    assert content(pair.out) == {"thesis.txt": b"years of work"}


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    pair.out.write_text("years of work")
    for options in ((), ("--overwrite",)):
        assert lora_tool(*pair.arguments, *options).code == 6
    assert pair.out.read_text() == "years of work"


@pytest.mark.parametrize("which", ["base", "adapter", "parent", "link"])
def test_an_input_or_a_folder_around_it_is_never_replaced(which: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (tmp_path / "link").symlink_to(pair.base)
    out = tmp_path if which == "parent" else tmp_path / which
    for folder in (tmp_path, pair.base, pair.adapter):
        (folder / "lora_tool.json").write_text('{"merged_adapters": []}')
    before = content(pair.base)
    done = lora_tool("merge", str(pair.adapter), "--base", str(pair.base), "-o", str(out), "--overwrite")
    assert done.code == 6, done.err
    assert "input" in done.err
    assert content(pair.base) == before


def test_our_own_folder_is_replaced_only_on_request(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    assert lora_tool(*pair.arguments).code == 0
    first = content(pair.out)
    done = lora_tool(*pair.arguments)
    assert done.code == 6
    assert "--overwrite" in done.err
    assert lora_tool(*pair.arguments, "--overwrite", "--precision", "float64").code == 0
    assert json.loads((pair.out / "lora_tool.json").read_text())["precision"] == "float64"
    assert lora_tool(*pair.arguments, "--overwrite").code == 0
    assert content(pair.out) == first
    assert left_behind(pair) == {"out"}


def test_a_failing_replacement_keeps_the_old_folder(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    execute(plan_of(pair), pair.out)
    before = content(pair.out)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OutOfSpace):
        execute(plan_of(pair), pair.out, overwrite=True, progress=full)
    assert content(pair.out) == before
    assert left_behind(pair) == {"out"}


def test_an_empty_folder_is_no_obstacle(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    pair.out.mkdir()
    assert lora_tool(*pair.arguments).code == 0
    assert open_checkpoint(pair.out).kind is MERGED_MODEL


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)

    def appear(_: int) -> None:
        pair.out.mkdir(exist_ok=True)
        (pair.out / "thesis.txt").write_text("years of work")

    with pytest.raises(OutputExists, match="another program created .* while it was being written"):
        execute(plan_of(pair), pair.out, progress=appear, jobs=1)
    assert content(pair.out) == {"thesis.txt": b"years of work"}
    assert left_behind(pair) == {"out"}


def test_of_two_runs_to_one_output_the_second_is_refused(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    lock = os.open(f"{pair.out.parent}/.out.lora-tool-partial.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = lora_tool(*pair.arguments)
    finally:
        os.close(lock)
    assert done.code == 6
    assert "another run is writing" in done.err
    assert lora_tool(*pair.arguments).code == 0
    assert left_behind(pair) == {"out"}


def test_a_second_run_started_within_the_first_is_refused_and_the_first_succeeds(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    refused: list[object] = []

    def start_another(_: int) -> None:
        if not refused:
            with pytest.raises(OutputExists, match="another run") as error:
                execute(plan_of(pair), pair.out)
            refused.append(error)

    execute(plan_of(pair), pair.out, progress=start_another, jobs=1)
    assert refused
    assert left_behind(pair) == {"out"}


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def shorten(path: Path) -> None:
    os.truncate(path, 100)


CHANGES = [touch, replace, grow, shorten]
FILES = ["adapter/adapter_model.safetensors", "base/model-00001-of-00002.safetensors", "adapter/tokenizer.json"]


@pytest.mark.parametrize("read", [False, True], ids=["planned", "while it is read"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_an_input_that_changes_is_seen(name: str, change: Callable[[Path], None], read: bool, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    plan = plan_of(pair)
    changed: list[object] = []

    def meddle(_: int) -> None:
        if not changed:
            changed.append(change)
            change(tmp_path / name)

    if not read:
        meddle(0)
    with pytest.raises(SourceChanged, match=Path(name).name):
        execute(plan, pair.out, progress=meddle, jobs=1)
    assert left_behind(pair) == set()


def test_an_input_that_vanished_is_named(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    plan = plan_of(pair)
    (pair.base / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ExecutionError, match="model-00001-of-00002.safetensors"):
        execute(plan, pair.out)
    assert left_behind(pair) == set()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (tmp_path / "file").write_text("")
    done = lora_tool("merge", str(pair.adapter), "--base", str(pair.base), "-o", str(tmp_path / "file" / "out"))
    assert done.code == 3
    assert "Traceback" not in done.err
    assert f"{tmp_path / 'file'} is not a folder" in done.err


def test_too_small_a_disk_is_told_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = copy_pair(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OutOfSpace, match=r"out needs .* KiB, the disk has 1000 B free"):
        execute(plan_of(pair), pair.out)
    assert left_behind(pair) == set()
