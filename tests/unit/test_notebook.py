"""Progress in a notebook: shown for long work, gone when it ends, and nothing elsewhere."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lora_tool.core.progress import unwatched
from lora_tool.workflows import notebook


class Page:
    """What a cell shows: one bar, in all its states."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def display(self, page: str, *, display_id: bool) -> Page:
        assert display_id
        self.states.append(page)
        return self

    def update(self, page: str) -> None:
        self.states.append(page)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    shown, python = Page(), ModuleType("IPython")
    vars(python).update(
        get_ipython=lambda: SimpleNamespace(kernel=object()),
        display=SimpleNamespace(HTML=str, display=shown.display),
    )
    monkeypatch.setitem(sys.modules, "IPython", python)
    return shown


def test_long_work_shows_one_bar_that_goes(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_FIRST", 0.0)
    monkeypatch.setattr(notebook, "_NEXT", 0.0)
    with notebook.default_watch()("writing <b>", 2048) as progress:
        progress(512)
        progress(1536)
    first, second, last = page.states
    assert first == 'writing &lt;b&gt; <progress value="512" max="2048"></progress> 512 B of 2 KiB'
    assert 'value="2048"' in second
    assert last == ""


def test_short_work_shows_nothing(page: Page) -> None:
    with notebook.default_watch()("writing", 100) as progress:
        progress(100)
    assert page.states == []


def test_outside_a_notebook_nothing_is_shown(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: None)
    assert notebook.default_watch() is unwatched
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook.default_watch() is unwatched
