from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.calling import FIXTURES, REPOSITORY


def on_a_terminal(*args: str, **environment: str) -> str:
    """Return what `lora-tool` writes to a terminal."""
    ours, theirs = pty.openpty()
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    done = subprocess.Popen(
        [sys.executable, "-m", "lora_tool", *args],
        stdout=theirs,
        env={**inherited, "PYTHONPATH": path, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            written += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
        done.wait()
    return written.decode()


def test_a_terminal_gets_colours_unless_its_user_says_no(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text((FIXTURES / "causal-llama/adapter/adapter_config.json").read_text())
    args = ["validate", str(tmp_path)]
    assert "\x1b[" in on_a_terminal(*args)
    plain = on_a_terminal(*args, NO_COLOR="1")
    assert plain
    assert "\x1b" not in plain


def test_the_verdict_of_a_merge_stands_out(tmp_path: Path) -> None:
    written = on_a_terminal("merge", str(FIXTURES / "reward-qwen2" / "adapter"), "-o", str(tmp_path / "out"))
    loud = [line for line in written.splitlines() if line.startswith("\x1b[32m\x1b[1m")]
    assert [line.split()[0].rpartition("m")[2] for line in loud] == ["verified"]
    quiet = [line for line in written.splitlines() if "\x1b[2m" in line]
    assert quiet
    assert all("copied" in line or "written" in line or "the base's" in line for line in quiet)


@pytest.mark.parametrize(
    ("command", "columns", "names"),
    [
        (["ls"], "60", ["checkpoint-2", "checkpoint-4 *", "0.617", "good"]),
        (["diff", "checkpoint-2", "checkpoint-4"], "80", ["down_proj", "score.weight", "0.182", "cosine"]),
        (["inspect", "checkpoint-2"], "60", ["gate_proj", "scaling", "0.193"]),
        (["prune"], "60", ["checkpoint-2", "88 KiB", "goes"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_no_name_or_number_is_broken_where_the_terminal_is_narrow(
    command: list[str], columns: str, names: list[str]
) -> None:
    name, *paths = command
    run = FIXTURES / "reward-run"
    written = on_a_terminal(name, *(str(run / path) for path in paths or ["."]), COLUMNS=columns, NO_COLOR="1")
    rows = written.splitlines()
    for shown in names:
        assert any(f"  {shown}  " in f"  {row}  " or row.endswith(f"  {shown}") for row in rows), (shown, written)
