from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# a machine that does other work at the same time is slow, and no test is wrong for that
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_SLOW_IMPORT = re.compile(
    r"^\s*(?:from|import) (?:torch|peft|transformers|matplotlib|tests\.(?:bench|fuzz|mutations|oracle|quantised))",
    re.MULTILINE,
)

_RUN_A_MODEL = ("[LT620]", "[LT625]", "[LT824]")
"""Ends of the names of tests that import torch all the same, to ask a model."""


def _is_fast(path: Path) -> bool:
    return path.parent.name in ("unit", "property") and not _SLOW_IMPORT.search(path.read_text())


@pytest.fixture
def typed_hints(tmp_path: Path) -> Iterator[None]:
    """Type what the hints of the errors say that a test raises."""
    from tests.typed import hints_typed  # the command line, only where it is asked for

    with hints_typed(tmp_path):
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m fast`, import no other test file: importing torch, transformers and PEFT takes longer than the tests."""
    if config.option.markexpr == "fast" and collection_path.match("test_*.py"):
        return not _is_fast(collection_path)
    return None


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight: it went through a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is fast, and put what trains first, so that no worker begins a test of 20 s when the others are done."""
    for item in items:
        if _is_fast(item.path) and not item.name.endswith(_RUN_A_MODEL):
            item.add_marker(pytest.mark.fast)
    items.sort(key=lambda item: item.path.parent.name != "train")
