"""An output that exists already is named before an input is opened or planned, by the library as by the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lora_tool
from lora_tool.core.errors import OutputExists
from tests.cli.calling import FIXTURES, Caller

PLANS = (
    "lora_tool.workflows.merge.plan_merge",
    "lora_tool.workflows.consolidate.plan_consolidate",
    "lora_tool.plans.algebra.plan_combine.plan_combine",
    "lora_tool.plans.algebra.plan_combine.plan_resize",
    "lora_tool.plans.algebra.plan_extract.plan_extract",
    "lora_tool.plans.algebra.plan_prepare.plan_prepare",
    "lora_tool.plans.convert.plan_convert.plan_convert",
)
ADAPTER, BASE = FIXTURES / "reward-qwen2" / "adapter", FIXTURES / "reward-qwen2" / "base"
RANKS = FIXTURES / "zero" / "stage3-reward"

LIBRARY: dict[str, Callable[[Any, Any, Path], object]] = {
    "merge": lambda adapter, base, out: lora_tool.merge(adapter, out=out, base=base),
    "consolidate": lambda adapter, _, out: lora_tool.consolidate(adapter, out=out),
    "combine": lambda adapter, _, out: lora_tool.combine([adapter], out=out),
    "resize": lambda adapter, _, out: lora_tool.resize(adapter, out=out, rank=2),
    "extract": lambda adapter, base, out: lora_tool.extract(adapter, base, out=out, rank=2),
    "prepare": lambda adapter, _, out: lora_tool.prepare(adapter, "vllm", out=out),
    "convert": lambda adapter, _, out: lora_tool.convert(adapter, "peft", out=out),
}
TYPED: dict[str, Callable[[Path, Path], list[str | Path]]] = {
    "merge": lambda adapter, base: ["merge", adapter, "--base", base],
    "consolidate": lambda adapter, _: ["consolidate", adapter],
    "combine": lambda adapter, _: ["combine", adapter],
    "resize": lambda adapter, _: ["resize", adapter, "--rank", "2"],
    "extract": lambda adapter, base: ["extract", adapter, "--base", base, "--rank", "2"],
    "prepare": lambda adapter, _: ["prepare", adapter, "--for", "vllm"],
    "convert": lambda adapter, _: ["convert", adapter, "--to", "peft"],
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output of ours, where nothing may be planned."""

    def planned(*_: object, **__: object) -> None:
        raise AssertionError("it was planned first")

    for plan in PLANS:
        monkeypatch.setattr(plan, planned)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "lora_tool.json").write_text("{}")
    return folder


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A folder that no kind of checkpoint is opened from."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_names_it_first(name: str, out: Path, unreadable: Path) -> None:
    with pytest.raises(OutputExists, match="exists already"):
        LIBRARY[name](unreadable, unreadable, out)
    opened = lora_tool.open_checkpoint(RANKS if name == "consolidate" else ADAPTER)
    with pytest.raises(OutputExists, match="exists already"):
        LIBRARY[name](opened, BASE, out)


@pytest.mark.parametrize("name", TYPED)
def test_the_command_names_it_first(name: str, out: Path, unreadable: Path, call: Caller) -> None:
    for ending in ((), ("--dry-run",)):
        done = call(*TYPED[name](unreadable, unreadable), "-o", out, *ending)
        assert (done.code, "exists already" in done.err) == (6, True)
        assert "--overwrite replaces it" in done.err


def test_a_default_output_is_named_first_too(
    tmp_path: Path, out: Path, unreadable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty-merged").mkdir()
    (tmp_path / "empty-merged" / "lora_tool.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputExists, match="empty-merged exists already"):
        lora_tool.merge(unreadable)
    with pytest.raises(OutputExists, match="exists already"):
        lora_tool.prepare(unreadable, "vllm", out=tmp_path / "new", reward_base=out)


def test_one_of_several_that_exists_stops_no_other(out: Path, unreadable: Path) -> None:
    """Of `merge_each`, whose outputs lie in one folder."""
    (out / "empty").mkdir()
    (out / "empty" / "lora_tool.json").write_text("{}")
    one, other = lora_tool.merge_each([unreadable, out.parent], out=out)
    assert isinstance(one.error, OutputExists)
    assert other.error is not None
    assert not isinstance(other.error, OutputExists)
