from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.execution.engine import execute
from tests.cli.calling import FIXTURES, REPOSITORY, Caller
from tests.hub.server import Hub

REPO = "me/reward"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub of this test's own that the client in this process talks to, over LFS, and that nobody waits for."""
    with Hub() as opened:
        monkeypatch.setattr(constants, "ENDPOINT", opened.url)
        template = opened.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setenv("HF_TOKEN", opened.token)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(time, "sleep", lambda _seconds: None)
        huggingface_hub.set_client_factory(_client)
        yield opened
        huggingface_hub.set_client_factory(_http.default_client_factory)


_CERTIFICATES = ssl.create_default_context()


def _client() -> httpx2.Client:
    """The client as huggingface_hub makes it, but without reading the certificates again: a third of a second."""
    hooks = {"request": [_http.hf_request_event_hook]}
    return httpx2.Client(event_hooks=hooks, follow_redirects=True, timeout=None, verify=_CERTIFICATES)


def environment(hub: Hub, tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a program that is to use this Hub and nothing of this machine's."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    source = str(REPOSITORY / "src")
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH")])),
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        **more,
    }


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setenv("COLUMNS", "80")
    return Caller(capsys)


@pytest.fixture(scope="session")
def merged_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixtures' reward model, merged by lora-tool: three shards and a manifest."""
    folder = tmp_path_factory.mktemp("merged") / "reward"
    base, adapter = (open_checkpoint(FIXTURES / "reward-qwen2" / name) for name in ("base", "adapter"))
    assert isinstance(base, ModelDir)
    assert isinstance(adapter, AdapterDir)
    execute(plan_merge(base, adapter, task="reward"), folder)
    return folder


@pytest.fixture
def merged(merged_once: Path, tmp_path: Path) -> Path:
    """A copy of the merged reward model that a test may change."""
    return Path(shutil.copytree(merged_once, tmp_path / "reward"))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "reward-run" / "checkpoint-4", tmp_path / "checkpoint-4"))
