"""`lora-tool ci --push`: the last stage, against the loopback Hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from tests.cli.calling import FIXTURES, Caller
from tests.hub.server import Hub

ADAPTER = FIXTURES / "reward-qwen2" / "adapter"


def statuses(call: Caller, *args: str | Path, code: int = 0) -> dict[str, str]:
    done = call("ci", ADAPTER, "--rm", *args, "--json")
    assert done.code == code, done.err
    return {stage["name"]: stage["status"] for stage in done.json["stages"]}


def test_a_second_run_pushes_nothing(call: Caller, hub: Hub, tmp_path: Path) -> None:
    arguments = ("-o", tmp_path / "out", "--push", "hf://me/rm")
    assert statuses(call, *arguments)["push"] == "passed"
    commits = list(hub.repos["me/rm"].commits)
    again = statuses(call, *arguments)
    assert [again[name] for name in ("merge", "verify", "push")] == ["reused"] * 3
    assert list(hub.repos["me/rm"].commits) == commits


def test_a_push_that_is_refused_goes_on_from_there(
    call: Caller, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("-o", tmp_path / "out", "--push", "me/rm")
    with monkeypatch.context() as patched:
        patched.setenv("HF_TOKEN", "hf_wrong")
        assert statuses(call, *arguments, code=4)["push"] == "failed"
    assert (tmp_path / "out" / "lora_tool.json").is_file()
    again = statuses(call, *arguments)
    assert [again[name] for name in ("merge", "verify", "push")] == ["reused", "reused", "passed"]
    assert len(hub.repos["me/rm"].commits) == 2


def test_a_branch_may_be_named_once(call: Caller, hub: Hub, tmp_path: Path) -> None:
    arguments = ("ci", ADAPTER, "-o", tmp_path / "out", "--push", "hf://me/rm@v2")
    assert call(*arguments, "--revision", "v3").code == 2
    assert call(*arguments, "--revision", "v2").code == 0
    assert set(hub.repos) == {"me/rm"}


def test_a_hub_package_that_cannot_push_is_said_before_the_work(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "set_client_factory", None)
    found = call("ci", ADAPTER, "--rm", "-o", tmp_path / "out", "--push", "me/model")
    assert found.code == 3
    assert "failed  open" in found.out
    assert "push needs huggingface_hub 1.0 or newer" in found.out + found.err
    assert list(tmp_path.iterdir()) == []
