"""Ctrl-C at every stage: exit code 130 within moments, and the repository as it was or with the whole commit."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.calling import Caller
from tests.hub.conftest import REPO, environment
from tests.hub.server import Hub
from tests.hub.test_push import assert_holds

PATIENCE = 60


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        ("^GET /api/models/me/reward/tree", signal.SIGINT),
        ("^PUT /storage", signal.SIGTERM),
        ("^POST /api/models/me/reward/commit", signal.SIGINT),
    ],
    ids=["reading", "uploading, terminated", "committing"],
)
def test_an_interrupt(stage: str, how: signal.Signals, hub: Hub, call: Caller, merged: Path, tmp_path: Path) -> None:
    repo = hub.repo(REPO)
    before = dict(repo.head.tree)
    hub.fault(stage, delay=PATIENCE, times=9, status=503)
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_tool", "push", str(merged), REPO],
        env=environment(hub, tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a job in the background of a shell ignores Ctrl-C, and its children would, too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread, and no lock
    )
    until = time.monotonic() + PATIENCE
    while not hub.asked(stage) and time.monotonic() < until:
        process.poll()
        assert process.returncode is None, process.communicate()
        threading.Event().wait(0.05)  # the fixture has made `time.sleep` instant
    assert hub.asked(stage)
    asked = time.monotonic()
    process.send_signal(how)
    out, err = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - asked < PATIENCE / 3
    assert process.returncode == 130, err
    assert out == ""
    assert err.rstrip().endswith("interrupted")
    assert "Traceback" not in err
    assert repo.head.tree == before
    hub.faults.clear()
    assert call("push", merged, REPO).code == 0
    assert len(repo.history) == 2
    assert_holds(repo, merged)
