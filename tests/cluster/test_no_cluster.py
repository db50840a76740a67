"""What is said where there is no cluster, before any work."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_tool.core.errors import ExecutionError, WrongValue
from lora_tool.plans.merge.options import MergeArguments
from lora_tool_ray import ray_cluster, reaching
from lora_tool_ray.ray_cluster import RayCluster
from lora_tool_ray.reaching import require_node
from tests.hostile.folders import copy_pair, left_behind, lora_tool

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lora-tool[ray]'")


SETTINGS = bytes(3) + b"\x04" + bytes(5)


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Yield the address of a program that reads a little and answers."""

    def once(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(once, server)
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("no-such-host.invalid:6379", "no Ray cluster answers"),
        ("somewhere", "is not the address of a Ray cluster"),
        ("host:99999999", "no Ray cluster answers"),
        ("ray://127.0.0.1:10001", "Ray's client"),
        ("http://127.0.0.1:8265", "the dashboard"),
    ],
)
def test_a_wrong_address_is_said_before_anything_is_read(address: str, words: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    began = time.monotonic()
    done = lora_tool(*pair.arguments, "--engine", "ray", "--address", address)
    assert done.code == 3
    assert words in done.err
    assert "hint: " in done.err
    assert time.monotonic() - began < 10
    assert left_behind(pair) == set()


def test_the_address_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "require_node", lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ExecutionError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        RayCluster().require()
    monkeypatch.setenv("RAY_ADDRESS", "")
    RayCluster().require()
    with listening(SETTINGS) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        RayCluster().require()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"-ERR unknown command\r\n", b"SSH", b""])
def test_another_program_at_the_address_is_told_at_once(answer: bytes) -> None:
    with listening(answer) as address, pytest.raises(ExecutionError, match="is not the head of a Ray cluster"):
        RayCluster(address=address).require()


def test_a_program_that_says_nothing_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "_CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ExecutionError, match=f"no Ray cluster answers at {address}: timed out"):
            RayCluster(address=address).require()


def test_a_machine_that_is_no_node_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = tmp_path / "proc"
    monkeypatch.setattr(reaching, "_PROCESSES", processes)
    RayCluster().require()  # nobody can tell
    for number, name in (("1", "init"), ("22", "python")):
        (processes / number).mkdir(parents=True)
        (processes / number / "comm").write_text(f"{name}\n")
    with pytest.raises(ExecutionError, match="no Ray node runs on this machine"):
        RayCluster().require()
    (processes / "22" / "comm").write_text("raylet\n")
    RayCluster().require()
    (processes / "22" / "cmdline").write_text("/ray/raylet\0--node_id=1\0--gcs-address=10.0.0.1:6379\0")
    for where in ("auto", "10.0.0.1:6379", "head:6379"):
        require_node(where)
    with pytest.raises(
        ExecutionError, match=r"one of the cluster at 10\.0\.0\.1:6379, not of that at 10\.0\.0\.1:6380"
    ):
        require_node("10.0.0.1:6380")
    (processes / "22" / "comm").write_text("python\n")
    (processes / "1" / "comm").unlink()
    RayCluster().require()  # the processes of other users are hidden


def test_options_of_a_cluster_are_for_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(WrongValue, match="`address` applies only to a cluster"):
        MergeArguments(address="127.0.0.1:1")
    pair = copy_pair(tmp_path)
    done = lora_tool(*pair.arguments, "--workers", "3")
    assert done.code == 2
    assert "--engine NAME" in done.err
