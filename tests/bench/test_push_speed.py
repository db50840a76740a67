"""A push of 1.5 GB over the loopback, and the same again: `pytest -m bench -s tests/bench/test_push_speed.py`.

The Hub of the tests keeps everything in memory and answers at once, so what is measured is our own part: hashing,
comparing, sending. `sha256sum` reads as many bytes as we have to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.models import make_base
from tests.bench.processes import Run, run, table
from tests.hub.conftest import environment
from tests.hub.server import Hub

ROUNDS = 3

pytestmark = pytest.mark.bench


def test_a_push_takes_little_more_than_reading_and_sending(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_base(folder, layers=12)
    push = [sys.executable, "-m", "lora_tool", "push", str(folder), "me/big", "-q"]
    hashing = ["sha256sum", *map(str, sorted(folder.glob("*.safetensors")))]
    runs: dict[str, list[Run]] = {"sha256sum": [], "push": [], "push again": []}
    with Hub() as hub:
        settings = environment(hub, tmp_path)
        for _ in range(ROUNDS):
            hub.repos.clear()
            hub.stored.clear()
            runs["sha256sum"].append(run(hashing))
            runs["push"].append(run(push, env=settings))
            hub.log.clear()
            runs["push again"].append(run(push, env=settings))
            assert not hub.asked("^PUT")
    print(f"\n{table(runs, against='sha256sum')}")
    assert max(taken.rss for taken in runs["push"]) < 150
