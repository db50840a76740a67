"""What tests here share: the command line, and what trainers save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.calling import Caller
from tests.made_once import made_once
from tests.oracle import trainer_saves
from tests.oracle.quantised_bases import Made


@pytest.fixture(scope="session", autouse=True)
def without_cards() -> Iterator[None]:
    """PEFT's model cards take a twentieth of an oracle's time, and no test reads them."""
    from peft import PeftModel

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PeftModel, "create_or_update_model_card", lambda *_: None)
        yield


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(capsys)


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `trainer_saves`."""
    return made_once(tmp_path_factory, "trainers", trainer_saves.make)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return what makes bases, quantised bases and adapters once."""
    return Made(tmp_path_factory)
