from __future__ import annotations

import pwd
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub import constants

from lora_tool.checkpoints.sources import cache_folder, may_hold
from tests.fuzz.commands import run


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
    ],
)
def test_the_variables_of_huggingface_hub(environment: dict[str, str], expected: str) -> None:
    assert cache_folder(environment) == Path(expected)


def test_the_default_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder({}) == Path("/home/somebody/.cache/huggingface/hub")


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a number that no user has, with no HOME."""

    def nobody(_number: int) -> NoReturn:
        raise KeyError

    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert not cache_folder({}).exists()
    assert not may_hold("o/m")
    code, _, err = run(("merge", "o/m"))
    assert (code, "no home folder" in err, "export HF_HOME" in err) == (3, True, True), err


@pytest.mark.parametrize("reference", ["o/m", "hf://o/m", "hf://o/m@main"])
def test_may_hold(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert not may_hold(reference)
    (tmp_path / "models--o--m").mkdir()
    assert may_hold(reference)
    assert not may_hold("o/m\0")
