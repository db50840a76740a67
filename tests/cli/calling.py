"""Calling the command line inside the test's process, and comparing what it prints with a file."""

from __future__ import annotations

import json
import math
import os
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


def assert_golden(name: str, text: str) -> None:
    """Compare with `golden/NAME`; with UPDATE_GOLDENS=1 in the environment, write it."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
