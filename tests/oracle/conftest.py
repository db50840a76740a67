"""What tests here share: the command line, and what is made once, however many processes run them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.cli.calling import Caller
from tests.oracle import trainer_saves


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(capsys)


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `trainer_saves`, made by the process that is first to need it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / "trainers"
    with (shared / "trainers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "done").exists():
            made.mkdir(exist_ok=True)
            trainer_saves.make(made)
            (made / "done").touch()
    return made
