"""A Hub that misbehaves while something is taken from it: the cause, the next step, the exit code, and an end in time."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from lora_tool.checkpoints.hub_client import downloading
from tests.cli.calling import FIXTURES, Caller
from tests.hub.conftest import environment
from tests.hub.server import Hub

ADAPTER = "me/adapter"
INFO = "^GET /api/models/me/adapter(/revision/[^/]+)?$"
ALWAYS = 99


def published(hub: Hub, name: str, folder: Path, **changed: bytes) -> None:
    """Put the files of a folder on the Hub."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    hub.repo(name).commit_files(files | changed)
    hub.stored |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}


@pytest.fixture
def offered(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A Hub with a reward adapter and its base, in an empty working directory."""
    published(hub, ADAPTER, FIXTURES / "reward-qwen2" / "adapter")
    published(hub, "me/base", FIXTURES / "reward-qwen2" / "base")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


def closed_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@dataclass(frozen=True)
class Case:
    """A fault of the Hub, the exit code, and what error and hint say. `prepare` does what is no fault of a request."""

    code: int
    error: str
    hint: str
    fault: dict[str, Any] | None = None
    on: str = INFO
    prepare: Callable[[Hub, pytest.MonkeyPatch], object] = lambda _hub, _patch: None
    reference: str = ADAPTER
    times: int = ALWAYS


def endpoint(url: Callable[[Hub], str]) -> Callable[[Hub, pytest.MonkeyPatch], None]:
    """Return what sends the client to another address."""
    return lambda hub, patch: patch.setattr(constants, "ENDPOINT", url(hub))


def no_token(_hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")


def error(status: int, **headers: str) -> dict[str, Any]:
    return {"status": status, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}


CASES = {
    "gated": Case(
        4,
        "me/adapter (not a folder here): the repository is gated, and this token has no access (403 Forbidden)",
        "request access on its page: http://127.0.0.1:PORT/me/adapter",
        error(403, X_Error_Code="GatedRepo"),
    ),
    "gated, no token": Case(
        4,
        "the repository is gated, and no token was sent (401 Unauthorized)",
        "/me/adapter, then run hf auth login, or set HF_TOKEN",
        error(401, X_Error_Code="GatedRepo"),
        prepare=no_token,
    ),
    "a token that is none": Case(
        4,
        "the Hub does not accept the token (401 Unauthorized)",
        "hf auth login, or set HF_TOKEN",
        prepare=lambda _, patch: patch.setenv("HF_TOKEN", "hf_" + "x" * 34),
    ),
    "a Hub for members": Case(
        4,
        "the Hub requires a token, and none was sent (401 Unauthorized)",
        "hf auth login, or set HF_TOKEN",
        error(401),
        prepare=no_token,
    ),
    "no such repository": Case(
        4,
        "me/other (not a folder here): no such repository, or the token may not see it (404 Not Found)",
        "check the name and `hf auth whoami`",
        reference="me/other",
    ),
    "no such repository, no token": Case(
        4,
        "no such repository, or it is private, and no token was sent (401 Unauthorized)",
        "for a private one: hf auth login",
        prepare=no_token,
        reference="hf://me/other",
    ),
    "no such revision": Case(
        4,
        "me/adapter@v9 (not a folder here): no such revision (404 Not Found)",
        "its branches and tags are listed at http://127.0.0.1:PORT/me/adapter",
        reference="me/adapter@v9",
    ),
    "offline variable": Case(
        7,
        "me/adapter (not a folder here, not in the Hub cache): HF_HUB_OFFLINE is set",
        "unset HF_HUB_OFFLINE, or on a connected machine with the same cache run: hf download me/adapter",
        prepare=lambda _, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True),
    ),
    "refused connection": Case(
        7,
        "no connection to the Hub: [Errno 111] Connection refused",
        "check the connection to http://127.0.0.1:",
        prepare=endpoint(lambda _: f"http://127.0.0.1:{closed_port()}"),
    ),
    "no such host": Case(
        7,
        "no connection to the Hub: [Errno -",
        "check the connection to http://nowhere.invalid, then run the same command again",
        prepare=endpoint(lambda _: "http://nowhere.invalid"),
    ),
    "no TLS there": Case(
        7,
        "no connection to the Hub: [SSL",
        "check the connection to https://127.0.0.1:PORT",
        prepare=endpoint(lambda hub: f"https://127.0.0.1:{hub.port}"),
    ),
    "silent": Case(7, "the Hub does not answer: ", "check the connection to", {"delay": 5}, times=1),
    "silent on the list of files": Case(
        7, "the Hub gave no valid answer for 1 s", "check the connection to", {"delay": 5}, "/tree/"
    ),
    "429": Case(7, "429 Too Many Requests: slow down", "again later", error(429, X_Error_Message="slow down")),
    "429, come back in an hour": Case(
        7, "the Hub answers 429 and asks to wait 3600 s", "in 3600 s", error(429, Retry_After="3600")
    ),
    "500": Case(7, "500 Internal Server Error", "run the same command again", error(500)),
    "503 on the list of files": Case(
        7, "503 Service Unavailable", "files already downloaded are kept", error(503), "/tree/"
    ),
    "hangs up": Case(7, "no connection to the Hub", "check the connection", {"drop": "before"}),
    "a page for people to log in": Case(
        7, "the Hub's answer is not JSON", "run the same command again", {"status": 200, "body": b"<html>Wi-Fi</html>"}
    ),
    "the storage lost the weights": Case(
        7,
        "the Hub's storage did not deliver a file (500 Internal Server Error)",
        "files already downloaded are kept",
        error(500),
        "^GET /cdn/",
    ),
    "hangs up in the weights": Case(7, "no connection to the Hub", "check the connection", {"drop": "after"}, "/cdn/"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_fault_is_said_in_time(
    case: Case, offered: Hub, call: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(downloading, "PATIENCE", 1)
    case.prepare(offered, monkeypatch)
    said = []
    slept: list[float] = []  # not the time that passed, which is also the machine's
    monkeypatch.setattr(time, "sleep", slept.append)
    for command in (("merge",), ("validate",), ("validate", "--json")):
        offered.faults.clear()
        shutil.rmtree(tmp_path / "hub-cache", ignore_errors=True)
        if case.fault is not None:
            offered.fault(case.on, times=case.times, **case.fault)
        called = call(*command, case.reference)
        assert sum(slept) < 60
        slept.clear()
        assert called.code == case.code, called.err
        said.append([line for line in called.err.splitlines() if line.startswith(("error:", "hint:"))])
        if "--json" in command:
            (unread,) = json.loads(called.out)["unread"]
            assert unread["message"] in called.err
            assert unread["hint"] in called.err
    assert said[0] == said[1] == said[2]
    problem, hint = said[0]
    assert case.error in problem
    assert case.hint.replace("PORT", str(offered.port)) in hint
    assert list(Path.cwd().iterdir()) == []


def test_a_silent_server_is_named_at_once(offered: Hub, tmp_path: Path) -> None:
    offered.fault(INFO, times=ALWAYS, delay=30)
    settings = environment(offered, tmp_path, HF_HUB_ETAG_TIMEOUT="3")
    words = [sys.executable, "-m", "lora_tool", "merge", ADAPTER]
    with subprocess.Popen(words, env=settings, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert running.stderr.readline() == "asking the Hub for me/adapter …\n"
        told = time.monotonic()
        assert "the Hub does not answer" in running.stderr.read()
        assert running.wait() == 7
    assert time.monotonic() - told > 1, "the line comes before the client has waited, not after"


def test_what_the_cache_holds_is_taken_where_the_hub_does_not_answer(offered: Hub, call: Caller) -> None:
    assert call("validate", ADAPTER).code == 0
    for fault in (error(500), error(429, Retry_After="3600"), {"drop": "before"}):
        offered.fault(INFO, times=1, **fault)
        called = call("validate", ADAPTER)
        assert called.code == 0, called.err
        assert "the Hub does not answer, so me/adapter is taken from the cache, commit " in called.err


@pytest.mark.parametrize("words", [("validate", "me/base"), ("merge", "me/base"), ("diff", "me/base", "me/base")])
def test_a_model_whose_weights_are_not_here_is_not_called_broken(
    words: tuple[str, ...], offered: Hub, call: Caller
) -> None:
    called = call(*words)
    assert (called.code, called.out) == (3, "")
    assert "me/base is a model on the Hub, and its weights are not in the cache" in called.err
    assert "hint: hf download me/base, then run the same command again" in called.err
    assert not any(asked.path.endswith(".safetensors") for asked in offered.log)


@pytest.mark.usefixtures("offered")
def test_the_clients_own_words_are_not_printed_where_nobody_watches(
    call: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    called = call("validate", ADAPTER, "--base", FIXTURES / "reward-qwen2" / "base")
    assert (called.code, called.err) == (0, "asking the Hub for me/adapter …\n")
    assert "No files matched" not in caplog.text


def test_offline_the_cache_is_taken_without_asking(offered: Hub, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("validate", ADAPTER).code == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(offered.log)
    called = call("validate", ADAPTER)
    assert (called.code, called.err) == (0, "")
    assert len(offered.log) == asked


@pytest.mark.parametrize(
    "reference",
    [
        "me/adapter@v2",
        "hf://me/adapter@v2",
        "https://huggingface.co/me/adapter/tree/v2",
        "https://huggingface.co/me/adapter/blob/v2/adapter_config.json?download=true",
        "huggingface.co/me/adapter/tree/v2/",
    ],
)
def test_every_way_to_write_it_is_understood(reference: str, offered: Hub, call: Caller) -> None:
    repo = offered.repo(ADAPTER)
    repo.tags["v2"] = repo.head.oid
    repo.commit_files({"adapter_config.json": b"{}"})
    called = call("merge", reference, "--base", "https://huggingface.co/me/base", "--rm", "-q")
    assert called.code == 0, called.err
    assert "asking" not in called.err
    recorded = json.loads(Path("adapter-merged/lora_tool.json").read_text())["inputs"]
    assert recorded["adapter"]["hub_id"] == ADAPTER
    assert recorded["base"]["hub_id"] == "me/base"


@pytest.mark.parametrize(
    ("name", "config", "how", "hint"),
    [
        ("me/base-hqq-4bit", {"quant_method": "hqq"}, "hqq", "me/base"),
        ("me/odd", {"quant_method": "aqlm", "bits": 4}, "4-bit aqlm", "some/original"),
    ],
)
def test_a_base_in_a_format_that_is_not_read_is_refused_before_its_weights_are_fetched(
    name: str, config: dict[str, Any], how: str, hint: str, offered: Hub, call: Caller
) -> None:
    base = FIXTURES / "reward-qwen2" / "base"
    table = json.loads((base / "config.json").read_text()) | {"quantization_config": config}
    card = b"---\nbase_model:\n- some/original\n---\n"
    published(offered, name, base, **{"config.json": json.dumps(table).encode(), "README.md": card})
    called = call("merge", FIXTURES / "reward-qwen2" / "adapter", "--base", name)
    assert called.code == 3
    assert f"error: {name}: the base is quantised ({how})" in called.err
    assert f"it was made from: --base {hint}" in called.err
    assert "some/original" in called.err
    assert not offered.asked("/cdn/")


def test_a_repository_of_gguf_files_is_called_what_it_is(offered: Hub, call: Caller) -> None:
    offered.repo("me/base-Q4_K_M-GGUF").commit_files({"base.Q4_K_M.gguf": b"GGUF" * 10, "README.md": b"# it"})
    called = call("merge", FIXTURES / "reward-qwen2" / "adapter", "--base", "me/base-Q4_K_M-GGUF")
    assert called.code == 3
    assert "its name suggests weights in a special quantised format" in called.err
    assert "--base me/base" in called.err


def a_folder(hub: Hub, name: str, folder: Path) -> None:
    """Put a folder on the Hub with what lies in its folders."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.repo(name).commit_files(files)
    hub.stored |= {hashlib.sha256(data).hexdigest(): data for data in files.values()}


TAKES_A_HUB_ID: dict[str, tuple[str, ...]] = {
    "validate": ("me/adapter",),
    "inspect": ("me/adapter",),
    "merge": ("me/adapter@main", "--rm", "--base", "me/base"),
    "ci": ("hf://me/adapter", "--rm", "--base", "me/base"),
    "verify": ("me/merged", "--adapter", "me/adapter", "--base", "me/base"),
    "consolidate": ("me/ranks@main",),
    "convert": ("me/adapter", "--to", "peft"),
    "combine": ("me/adapter=0.5", "-o", "combined"),
    "resize": ("me/adapter", "--rank", "2", "-o", "resized"),
    "prepare": ("me/causal", "--for", "vllm", "-o", "prepared"),
    "extract": ("me/merged", "--base", "me/base", "--rank", "2", "-o", "extracted"),
    "diff": ("me/adapter", "me/adapter@main"),
    "ls": ("me/adapter",),
    "push": ("me/adapter", "me/copy"),
    "prune": ("me/adapter",),
}


@pytest.mark.parametrize("name", TAKES_A_HUB_ID)
def test_every_command_that_takes_a_folder_takes_a_hub_id(
    name: str, offered: Hub, merged_once: Path, call: Caller
) -> None:
    published(offered, "me/causal", FIXTURES / "causal-llama" / "adapter")
    published(offered, "me/merged", merged_once)
    a_folder(offered, "me/ranks", FIXTURES / "zero" / "stage3-frozen-head")
    done = call(name, *TAKES_A_HUB_ID[name], "--json")
    if name == "prune":
        assert (done.code, done.json["error"]["hint"]) == (3, "lora-tool ls me/adapter")
        assert "prune removes nothing on the Hub" in done.err
        return
    assert done.code == 0, done.err + done.out
    assert done.json
    outputs = {
        "merge": {"adapter-merged"},
        "ci": {"adapter-merged"},
        "consolidate": {"ranks-adapter"},
        "convert": {"adapter-peft"},
    }
    named = set(TAKES_A_HUB_ID[name][-1:]) if "-o" in TAKES_A_HUB_ID[name] else set()
    assert {path.name for path in Path.cwd().iterdir()} == outputs.get(name, named)
