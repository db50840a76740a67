"""A FIFO, a folder, a socket or nothing readable where a file should be: an error, never a wait."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from tests.hostile.folders import FIXTURES, assert_refused, copy_pair, lora_tool


def make_socket(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # a socket's path must be short
        server.bind(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_socket], ids=["fifo", "folder", "socket"])
@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("base", "config.json"),
        ("base", "model.safetensors.index.json"),
        ("base", "model-00001-of-00002.safetensors"),
        ("base", "generation_config.json"),
        ("adapter", "adapter_config.json"),
        ("adapter", "adapter_model.safetensors"),
        ("adapter", "tokenizer.json"),
    ],
)
def test_it_is_refused_at_once(folder: str, name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    file = tmp_path / folder / name
    file.unlink()
    make(file)
    if make is os.mkdir and name in ("tokenizer.json", "generation_config.json"):
        assert lora_tool(*pair.arguments).code == 0  # a folder is no tokenizer file, and none is needed
    elif make is os.mkdir:
        assert_refused(pair)
    else:
        assert_refused(pair, str(file), "regular file" if make is os.mkfifo else "")


@pytest.mark.parametrize("name", ["base/config.json", "adapter/adapter_model.safetensors", "adapter/tokenizer.json"])
def test_an_unreadable_file_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = copy_pair(tmp_path)
    opened = os.open

    def refuse(path: str | Path, *how: int) -> int:
        """Root reads every file."""
        if str(path) == str(tmp_path / name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how)

    monkeypatch.setattr(os, "open", refuse)
    assert_refused(pair, "cannot be opened", f"chmod u+r {tmp_path / name}")


def test_a_config_near_rank_files_that_is_no_object(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero" / "stage3-full", tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("[1]")
    done = lora_tool("consolidate", str(tmp_path / "run"), "-o", str(tmp_path / "out"))
    assert done.code == 3
    assert "config.json: expected a JSON object" in done.err


@pytest.mark.parametrize("folder", ["base", "adapter"])
def test_pickles_are_named_and_never_loaded(folder: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    for file in (tmp_path / folder).glob("*.safetensors*"):
        file.unlink()
    name = "pytorch_model.bin" if folder == "base" else "adapter_model.bin"
    evidence = tmp_path / "loaded"
    # a pickle that would make a file: os.mkdir(evidence)
    (tmp_path / folder / name).write_bytes(b"cos\nmkdir\n(V" + str(evidence).encode() + b"\ntR.")
    assert_refused(pair, name, "pickle")
    assert not evidence.exists()


@pytest.mark.parametrize("content", ["", "null", "[]", "3", '"x"', "{", '{"a": 1, "a": 2}', "\ufeff{", "[" * 200_000])
@pytest.mark.parametrize(
    "name", ["adapter/adapter_config.json", "base/config.json", "base/model.safetensors.index.json"]
)
def test_broken_json_is_named(name: str, content: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (tmp_path / name).write_text(content)
    assert_refused(pair, str(tmp_path / name))


@pytest.mark.parametrize(
    "name",
    ["adapter/adapter_config.json", "base/config.json", "base/model.safetensors.index.json", "adapter/tokenizer.json"],
)
def test_what_editors_on_windows_put_before_the_text_is_named(name: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = tmp_path / name
    text = path.read_text()
    path.write_text(text, encoding="utf-16")
    assert_refused(pair, "is UTF-16, but JSON files are UTF-8")
    path.write_text(text, encoding="utf-8-sig")
    said = assert_refused(pair, "begins with a byte order mark, so PEFT and transformers cannot read it")
    subprocess.run(said.partition("remove the mark: ")[2].splitlines()[0], shell=True, check=True)
    assert path.read_text() == text
    path.write_text(text, newline="\r\n")
    assert lora_tool(*pair.arguments).code == 0


def test_integers_of_absurd_length_are_no_crash(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = pair.adapter / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 4', f'"r": {"9" * 5000}'))
    assert_refused(pair, str(path))
    path.write_text(
        json.dumps({"peft_type": "LORA", "r": 10**400, "target_modules": ["q_proj"], "lora_alpha": 10**400})
    )
    assert_refused(pair, str(path), " r: expected int")
