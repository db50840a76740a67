"""What a terminal of eighty columns shows: no word is broken, and no command."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lora_tool.cli.terminal import folded
from lora_tool.core.display import from_here
from tests.cli.calling import Caller, on_a_terminal


def without_bars(written: str) -> str:
    """What is left of it in the end, without what a progress bar draws."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))


@pytest.mark.parametrize(
    "words", ["merge fixtures/reward-qwen2/adapter -o OUT", "validate fixtures/zero/stage3-frozen-head"]
)
def test_lines_end_between_words(words: str, tmp_path: Path) -> None:
    typed = [str(tmp_path / "out") if word == "OUT" else word for word in words.split()]
    narrow = without_bars(on_a_terminal(*typed))
    more = ["--overwrite"] if "merge" in typed else []
    wide = without_bars(on_a_terminal(*typed, *more, columns=1000))
    for line in narrow.splitlines():
        assert len(line) <= 80 or "lora-tool " in line or line.startswith("next: "), line
    assert len(narrow.splitlines()) > len(wide.splitlines())
    of_time = re.compile(r".*(B/s|--:--|[━╸╺]).*|took .*")  # bars, and what a slow machine says at the end
    assert [w for line in narrow.splitlines() if not of_time.match(line) for w in line.split()] == [
        w for line in wide.splitlines() if not of_time.match(line) for w in line.split()
    ]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("a " * 25 + "end", ["a " * 24 + "a", "  end"]),
        ("  in " + "a " * 25, ["  in " + "a " * 22 + "a", "    a a "]),
        (
            "  error    LT301  " + "word " * 8,
            ["  error    LT301  word word word word word word", " " * 18 + "word word "],
        ),
        ("short", ["short"]),
        ("hint: " + "word " * 20, ["hint: " + "word " * 20]),
        ("they lie there: lora-tool consolidate " + "x" * 40, ["they lie there: lora-tool consolidate " + "x" * 40]),
        ("x" * 60 + " tail", ["x" * 60, "  tail"]),
        ("\x1b[1m" + "a " * 25 + "end\x1b[0m", ["\x1b[1m" + "a " * 24 + "a", "  end\x1b[0m"]),
    ],
)
def test_a_line_is_folded(line: str, shown: list[str]) -> None:
    assert folded(line, 50).split("\n") == shown


def test_a_path_is_shown_as_it_would_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "a" / "b") == Path("a/b")
    assert from_here(Path("c")) == Path("c")
    assert from_here(tmp_path.parent / "d") == tmp_path.parent / "d"


@pytest.mark.parametrize("loaded", [False, True])
def test_what_torch_brought_is_collected_at_the_end(
    loaded: bool, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton lists on stderr, in dozens of lines, which of its objects are left."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert call("--version").code == 0
    assert bool(frozen) is not loaded
