"""Good folders to break, the command line to run on them, and what every refusal must look like."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

from tests.cli.calling import Called
from tests.fuzz.commands import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE = Path(__file__).parents[2] / "src"
SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A copy of a fixture that a test may break."""

    base: Path
    adapter: Path
    out: Path

    @property
    def arguments(self) -> list[str]:
        return ["merge", str(self.adapter), "--base", str(self.base), "-o", str(self.out)]


def copy_pair(folder: Path, name: str = "causal-llama") -> Pair:
    """Return a private copy of the fixture's base and adapter."""
    for part in ("base", "adapter"):
        shutil.copytree(FIXTURES / name / part, folder / part)
    return Pair(base=folder / "base", adapter=folder / "adapter", out=folder / "out")


def environment() -> dict[str, str]:
    """Return what a process of its own is started with."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


class TookTooLong(BaseException):
    """No error that a command could take for one of the system's."""


@contextmanager
def bounded() -> Iterator[None]:
    """Fail what waits or computes for ever."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TookTooLong(f"not done in {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def lora_tool(*arguments: str) -> Called:
    """Run the command in this process; one that hangs fails the test, and so does what it raises."""
    with pytest.MonkeyPatch.context() as patch, bounded():
        patch.setenv("COLUMNS", "200")
        return run(arguments)


def left_behind(pair: Pair) -> set[str]:
    """Return the names beside the inputs, hidden ones too."""
    return {path.name for path in pair.out.parent.iterdir()} - {"base", "adapter"}


def assert_refused(pair: Pair, *words: str, options: tuple[str, ...] = ()) -> str:
    """Run the merge and return what it says, after checking all that every refusal must keep to."""
    done = lora_tool(*pair.arguments, *options)
    form = {1: r"^  error +LT\d{3}  ", 3: r"\Aerror: "}[done.code]  # a rule's finding, or what no rule is about
    assert re.search(form, done.err, re.MULTILINE), done.err
    assert "Traceback" not in done.out + done.err
    assert all(character.isprintable() or character == "\n" for character in done.err)
    for word in words:
        assert word in done.err, done.err
    assert not pair.out.exists()
    assert left_behind(pair) == set()
    return done.err
