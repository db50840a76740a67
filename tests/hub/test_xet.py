"""The way that a default installation takes: hf_xet chunks, uploads and downloads, against a folder in place of its CAS.

`local://` is a feature of hf_xet's own tests; where a version refuses it, these are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.conftest import REPO, environment
from tests.hub.server import Hub

pytest.importorskip("hf_xet")


def run(hub: Hub, tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    settings = environment(hub, tmp_path, HF_XET_CACHE=str(tmp_path / "xet-cache"))
    del settings["HF_HUB_DISABLE_XET"]
    command = [sys.executable, "-m", "lora_tool", "push", *args]
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=300)


def test_a_push_through_xet_reads_back_and_repeats_for_nothing(hub: Hub, merged: Path, tmp_path: Path) -> None:
    hub.xet_folder = tmp_path / "cas"
    hub.xet_folder.mkdir()
    pushed = run(hub, tmp_path, str(merged), REPO, "--verify", "download")
    if "local://" in pushed.stderr and pushed.returncode:
        pytest.skip(f"this hf_xet takes no local:// address: {pushed.stderr}")
    assert pushed.returncode == 0, pushed.stderr
    assert hub.asked("xet-write-token")
    assert hub.asked("xet-read-token")
    assert not hub.asked("^PUT /storage|objects/batch|^GET /cdn")
    repo = hub.repos[REPO]
    shard = repo.head.tree["model-00001-of-00003.safetensors"]
    assert shard.xet_hash is not None
    assert shard.size == (merged / "model-00001-of-00003.safetensors").stat().st_size
    hub.log.clear()
    again = run(hub, tmp_path, str(merged), REPO)
    assert again.returncode == 0, again.stderr
    assert len(repo.history) == 2
    assert not hub.asked("^(POST|PUT)")


@pytest.mark.parametrize(("status", "code"), [(401, 4), (403, 4)])
def test_a_token_that_xet_does_not_get(status: int, code: int, hub: Hub, merged: Path, tmp_path: Path) -> None:
    hub.xet_folder = tmp_path / "cas"
    hub.xet_folder.mkdir()
    repo = hub.repo(REPO)
    hub.fault("xet-write-token", status=status, times=99)
    refused = run(hub, tmp_path, str(merged), REPO)
    assert refused.returncode == code, refused.stderr
    assert str(status) in refused.stderr
    assert hub.token not in refused.stderr
    assert len(repo.history) == 1
