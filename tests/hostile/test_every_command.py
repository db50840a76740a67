"""What must not happen, tried on every command that reads: no traceback, no wait, no code run, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_tool.cli.options import UserPath
from tests.fuzz.commands import must_hold, run
from tests.fuzz.injuries import NASTY
from tests.fuzz.targets import FIXTURES
from tests.hostile.folders import bounded

DEEP = b'{"a":' + b"[" * 100_000
UTF16 = '{"peft_type": "LORA"}'.encode("utf-16")
HUGE = 10_000_000_000
"""Bytes of a sparse file: all zeros, and no disk is used."""


class Bomb:
    """Makes a file when it is unpickled in the ordinary way."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _zip(path: Path, data: bytes, *, compress: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compress) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")


def _content(data: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.write_bytes(data)

    return put


def _linked(target: str) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return put


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HUGE)


def _bomb(path: Path) -> None:
    _zip(path, pickle.dumps({"weights": Bomb(path.parent / "exploded")}, 2))


def _bare_bomb(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(path.parent / "exploded"), 2))


def _compressed(path: Path) -> None:
    _zip(path, bytes(50_000_000), compress=zipfile.ZIP_DEFLATED)


INSTEAD: Mapping[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "empty": _content(b""),
    "zeros": _content(bytes(4096)),
    "text": _content(b"<!DOCTYPE html><html>404</html>"),
    "no utf-8": _content(b'{"\xff\xfe": "\xc3"}'),
    "utf-16": _content(UTF16),
    "deep": _content(DEEP),
    "null": _content(b"null"),
    "a list": _content(b"[1, 2, 3]"),
    "not a number": _content(b'{"r": NaN, "weight_map": Infinity, "global_step": -Infinity}'),
    "10 GB of zeros": _sparse,
    "a FIFO": _fifo,
    "a folder": _folder,
    "a device": _linked("/dev/zero"),
    "the memory of the process": _linked("/proc/self/mem"),
    "a dangling link": _linked("nowhere"),
    "a link to itself": lambda path: _linked(path.name)(path),
    "a link out": _linked("/etc/hostname"),
    "a pickle in a zip": _bomb,
    "a bare pickle": _bare_bomb,
    "a compressed zip": _compressed,
}

FILES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "adapter": ("reward-qwen2", ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")),
    "tokenizer": ("reward-qwen2", ("adapter/tokenizer.json", "adapter/tokenizer_config.json")),
    "base": (
        "reward-qwen2",
        ("base/config.json", "base/model.safetensors.index.json", "base/model-00002-of-00003.safetensors"),
    ),
    "run": ("reward-run", ("checkpoint-2/trainer_state.json", "checkpoint-4/optimizer.pt")),
    "rank files": (
        "zero/stage3-reward",
        (
            "latest",
            "global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt",
            "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
    ),
    "fsdp": ("fsdp2-reward", ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__1_0.distcp")),
}
CASES = [
    # everything stands in the place of a file of every other group, in one of its files in turn
    (which, files[at // 2 % len(files)], instead)
    for group, (which, (_, files)) in enumerate(FILES.items())
    for at, instead in enumerate(INSTEAD)
    if (group + at) % 2 == 0
]


def commands(which: str, root: Path) -> list[tuple[str | Path, ...]]:
    out = root.parent / "out"
    if which in ("adapter", "tokenizer", "base"):
        adapter, base = root / "adapter", root / "base"
        return [
            ("validate", adapter, "--base", base, "--json"),
            ("validate", base, "--deep"),
            ("inspect", adapter if which != "base" else base),
            ("merge", adapter, "--base", base, "-o", out, "--dry-run"),
            ("convert", adapter, "--to", "peft", "--base", base, "-o", out, "--dry-run"),
        ]
    plain: list[tuple[str | Path, ...]] = [("validate", root), ("inspect", root, "--json")]
    return plain if which == "run" else [*plain, ("consolidate", root, "-o", out, "--dry-run")]


@pytest.mark.parametrize(("which", "file", "instead"), CASES)
def test_anything_in_the_place_of_a_file(which: str, file: str, instead: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(FIXTURES / FILES[which][0], root)
    INSTEAD[instead](root / file)
    with bounded():
        for arguments in commands(which, root):
            must_hold(arguments)
    assert not list(root.rglob("exploded"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "./x", "..", ".", "", "a/b", "..\\x", "C:\\x", "x\0y", NASTY]
)
def test_an_index_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2", tmp_path, dirs_exist_ok=True)
    index = tmp_path / "base" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"][next(iter(table["weight_map"]))] = name
    index.write_text(json.dumps(table))
    code, out, _ = run(("validate", tmp_path / "base", "--select", "LT107,LT108"))
    assert code == 1
    assert "LT10" in out
    for arguments in commands("base", tmp_path):
        must_hold(arguments)


@pytest.mark.parametrize("field", ["task_type", "base_model_name_or_path", "target_modules", "modules_to_save"])
@pytest.mark.parametrize("form", ["text", "json", "github", "markdown", "junit", "sarif"])
def test_no_report_lets_a_name_act(field: str, form: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    value = [NASTY, "q_proj"] if field in ("target_modules", "modules_to_save") else NASTY
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    code, out, err = run(("validate", tmp_path / "adapter", "--format", form))
    assert code in (0, 1)
    assert all(character.isprintable() or character in "\n\t" for character in out + err)
    if form != "github":
        assert not any(line.startswith("::") for line in out.splitlines())
    assert "\n::error file=x::boom" not in out


def test_folders_whose_names_are_no_text(tmp_path: Path) -> None:
    for name in (b"b\xffad", b"\x1b[31m\n::error::x", b" ", b"-rf", "é".encode()):
        folder = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
        shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", folder)
        (folder / os.fsdecode(b"model-00001-of-00002\xff.safetensors")).write_bytes(b"")
        for arguments in (("validate", folder), ("validate", folder, "--json"), ("inspect", folder, "--json")):
            assert must_hold(arguments) == 0


def test_a_path_that_is_no_text_goes_through_merge_and_consolidate(tmp_path: Path) -> None:
    root = Path(os.fsdecode(bytes(tmp_path) + b"/b\xffad"))
    for name in ("reward-qwen2", "zero/stage3-reward"):
        shutil.copytree(FIXTURES / name, root / name)
    pair, out = root / "reward-qwen2", root / "merged"
    assert must_hold(("merge", pair / "adapter", "--base", pair / "base", "-o", out)) == 0
    assert must_hold(("verify", out)) == 0
    assert must_hold(("consolidate", root / "zero" / "stage3-reward", "-o", root / "adapter")) == 0
    assert must_hold(("merge", root / "adapter", "-o", root / "again", "--dry-run")) == 0


def test_a_run_whose_checkpoints_are_links_ends(tmp_path: Path) -> None:
    for at in range(4):
        (tmp_path / f"checkpoint-{at}").symlink_to(".")
    with bounded():
        assert must_hold(("validate", tmp_path)) == 1
        assert must_hold(("inspect", tmp_path)) == 0


def test_a_checkpoint_that_is_a_link_out_is_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-run" / "checkpoint-2", tmp_path / "elsewhere")
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "checkpoint-2").symlink_to("../elsewhere")
    code, out, _ = run(("validate", run_folder))
    assert (code, "LT112" in out) == (1, True)


def test_a_file_is_not_taken_for_its_folder() -> None:
    for command in ("validate", "inspect", "merge"):
        code, _, err = run((command, FIXTURES / "reward-qwen2" / "adapter" / "adapter_model.safetensors"))
        assert (code, "is a file, not a folder" in err) == (3, True), err


def test_a_link_to_nothing_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/last").symlink_to("gone")
    for command in ("validate", "inspect", "merge"):
        code, _, err = run((command, "runs/last"))
        assert (code, "runs/last is a link to gone, which leads to nothing" in err) == (3, True), err


def test_what_may_not_be_read_is_no_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as root none would be refused
    assert UserPath().convert(str(FIXTURES), None, None) == FIXTURES


def test_a_file_that_shrinks_while_it_is_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", folder)
    weights, read = folder / "adapter_model.safetensors", os.pread
    calls = 0

    def pread(fd: int, size: int, at: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 12:
            os.truncate(weights, 100)
        return read(fd, size, at)

    monkeypatch.setattr(os, "pread", pread)
    code, _, err = run(("validate", folder))
    assert calls >= 12
    assert (code, "while it was read" in err) == (3, True), err
