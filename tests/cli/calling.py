"""Calling the command line inside the test's process, and comparing what it prints with a file."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from lora_tool.cli import options as timed
from lora_tool.cli.main import main

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "fixtures"
GOLDEN = Path(__file__).parent / "golden"


class Called(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Caller:
    """Runs `lora-tool` in the repository's root, where the fixtures have short names."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.long = math.inf
        """Seconds after which a command says how long it took: on a busy machine any may take 5."""

    def __call__(self, *args: str | Path) -> Called:
        self.capsys.readouterr()
        with mock.patch.object(timed, "LONG", self.long), pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        out, err = self.capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return Called(stopped.value.code, out, err)


def on_a_terminal(*words: str | Path, columns: int = 80, **environment: str) -> str:
    """Return what the command writes to a terminal of so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    ignored = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI")
    inherited = {name: value for name, value in os.environ.items() if name not in ignored}
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.Popen(
        [sys.executable, "-m", "lora_tool", *map(str, words)],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=REPOSITORY,
        env={**inherited, "PYTHONPATH": path, "TERM": "xterm-256color", **environment},
    )
    os.close(its)
    written = b""
    try:
        while piece := os.read(ours, 1 << 16):
            written += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
        done.wait()
    return written.decode()


def assert_golden(name: str, text: str) -> None:
    """Compare with `golden/NAME`; with UPDATE_GOLDENS=1 in the environment, write it."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
