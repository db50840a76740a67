from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.calling import Caller

torch = pytest.importorskip("torch", reason="torch is not installed: pip install lora-tool[train]")
pytest.importorskip("trl", reason="trl is not installed: pip install lora-tool[train]")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models train faster on one thread, and the cores are for the other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    """The command line in this process, which has TRL; its workers print to the captured files too."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Caller(capfd)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Caller) -> object:
    from tests.train.running import Trainings

    # both read the environment once, when they are imported; without a network they would try again and again
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return Trainings(tmp_path, call)
