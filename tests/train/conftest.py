from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed: pip install lora-tool[train]")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    from tests.train.running import Trainings

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return Trainings(tmp_path)
