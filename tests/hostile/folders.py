"""Good folders to break, the command line to run on them, and what every refusal must look like."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE = Path(__file__).parents[2] / "src"


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
    return {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def lora_tool(*arguments: str, cwd: Path | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; one that hangs fails the test."""
    return subprocess.run(
        [sys.executable, "-m", "lora_tool", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def left_behind(pair: Pair) -> set[str]:
    """Return the names beside the inputs, hidden ones too."""
    return {path.name for path in pair.out.parent.iterdir()} - {"base", "adapter"}


def assert_refused(pair: Pair, *words: str, options: tuple[str, ...] = ()) -> str:
    """Run the merge and return what it says, after checking all that every refusal must keep to."""
    done = lora_tool(*pair.arguments, *options)
    form = {1: r"^  error +LT\d{3}  ", 3: r"\Aerror: "}[done.returncode]  # a rule's finding, or what no rule is about
    assert re.search(form, done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert all(character.isprintable() or character == "\n" for character in done.stderr)
    for word in words:
        assert word in done.stderr, done.stderr
    assert not pair.out.exists()
    assert left_behind(pair) == set()
    return done.stderr
