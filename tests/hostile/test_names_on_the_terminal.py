"""Names with control characters, terminal sequences and workflow commands come out as harmless text."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tool.formats.safetensors import build_header
from tests.headers import read_file
from tests.hostile.folders import assert_refused, copy_pair, environment, lora_tool

NASTY = "\x1b]0;owned\x07\r\n::error file=x::boom\u202egnp.exe\x9b31m\0\u2028"


def rename_first_tensor(path: Path, name: str) -> None:
    file = read_file(path)
    data = path.read_bytes()[file.data_start :]
    tensors = sorted(file.tensors.values(), key=lambda tensor: tensor.spans[0].offset)
    old = tensors[0].name
    raw = json.loads(build_header((tensor.spec for tensor in tensors), {"format": "pt"})[8:])
    renamed = {name if key == old else key: entry for key, entry in raw.items()}
    text = json.dumps(renamed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("name", [NASTY, f"base_model.model.{NASTY}.lora_A.weight", f"{NASTY}.weight"])
def test_a_tensor_name_cannot_act(name: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    rename_first_tensor(pair.adapter / "adapter_model.safetensors", name)
    message = assert_refused(pair, "adapter_model.safetensors")
    assert "\n::error" not in message


def test_a_file_name_cannot_act(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (pair.base / "LICENSE\x1b[31m\n::error::x").write_text("free")
    for options in ((), ("--dry-run",)):
        done = lora_tool(*pair.arguments, *options)
        assert done.code in (0, 6)
        assert all(character.isprintable() or character == "\n" for character in done.out + done.err)
        assert "\n::error" not in done.out + done.err


def test_json_output_stays_json(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (pair.base / "LICENSE\x1b[31m\n::error::x").write_text("free")
    done = lora_tool(*pair.arguments, "--dry-run", "--json")
    assert done.code == 0, done.err
    assert any(file["filename"].startswith("LICENSE") for file in json.loads(done.out)["side_files"])
    assert "\x1b" not in done.out


@pytest.mark.parametrize("redirected", [">&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_closed_streams_take_nothing_from_the_result(redirected: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    command = shlex.join([sys.executable, "-m", "lora_tool", *pair.arguments])
    done = subprocess.run(["sh", "-c", f"{command} {redirected}"], env=environment(), capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    code = subprocess.run([sys.executable, "-m", "lora_tool", "verify", str(pair.out)], env=environment(), check=False)
    assert code.returncode == 0


def test_what_the_terminal_cannot_write_is_escaped() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lora_tool", "rules"],
        env={**environment(), "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, rb"W + \u0394W" in done.stdout) == (0, True), done.stderr
