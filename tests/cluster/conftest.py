"""A real Ray cluster of two nodes on this machine, each with a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lora-tool[ray]'")
ROOT = Path(__file__).parents[2]
COUNTED = """
import sys, time, ray
ray.init(sys.argv[1], logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
    time.sleep(0.1)
"""
"""What ends when the cluster has so many nodes."""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@dataclass
class Cluster:
    """Nodes that were started by `ray start`; each is a group of processes."""

    port: int = field(default_factory=free_port)
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    # a socket's path has 107 bytes at most, and pytest's folders are long
    place: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray", dir="/tmp")))

    @property
    def address(self) -> str:
        return f"127.0.0.20:{self.port}"

    @property
    def options(self) -> list[str]:
        return ["--engine", "ray", "--address", self.address]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_health_check_failure_threshold": "2",
            "RAY_health_check_period_ms": "1000",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def add(self, *, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a node and return its group's first process; `within` is the command that starts it."""
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.place}"]
            if not self.nodes
            else [f"--address={self.address}"]
        )
        command = [*within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        command += [*where, f"--node-ip-address=127.0.0.{20 + len(self.nodes)}", "--disable-usage-stats"]
        with (self.place / f"node{len(self.nodes)}.log").open("wb") as log:
            self.nodes.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )
        return self.nodes[-1]

    def wait_for(self, count: int) -> None:
        """Return when so many nodes are there."""
        limit = time.monotonic() + 90
        while True:  # until the first node takes connections
            asked = subprocess.run(
                [sys.executable, "-c", COUNTED, self.address, str(count)],
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=90,
            )
            if asked.returncode == 0:
                return
            assert time.monotonic() < limit, f"no {count} nodes: {asked.stdout}{asked.stderr}"

    def remove(self, node: subprocess.Popen[bytes]) -> None:
        node.send_signal(signal.SIGTERM)
        try:
            node.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            self.remove(node)
        shutil.rmtree(self.place, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class NodeApart:
    """A node that has mounts of its own, so that it can see other storage than all others."""

    process: subprocess.Popen[bytes]
    enters: Sequence[str]

    @contextlib.contextmanager
    def mounted(self, *arguments: str | Path) -> Iterator[None]:
        """Mount something on the node alone, the last of `arguments` is where: `mount ARGUMENTS`."""
        self._run("mount", *map(str, arguments))
        try:
            yield
        finally:
            self._run("umount", "--lazy", str(arguments[-1]))

    def _run(self, *command: str) -> None:
        subprocess.run(["nsenter", f"--target={self.process.pid}", *self.enters, *command], check=True)


@contextlib.contextmanager
def node_apart(cluster: Cluster) -> Iterator[NodeApart]:
    """Yield a third node whose mounts can be changed. Skips where nobody may mount."""
    unshare, enters = own_mounts()
    process = cluster.add(within=unshare)
    try:
        cluster.wait_for(3)
        yield NodeApart(process=process, enters=enters)
    finally:
        cluster.remove(process)
        cluster.wait_for(2)


def own_mounts() -> tuple[Sequence[str], Sequence[str]]:
    """Return the command that gives a process mounts of its own, and options of `nsenter` to change them. Skips."""
    as_root = ["unshare", "--mount"], ["--mount"]
    as_anybody = ["unshare", "--mount", "--map-root-user"], ["--user", "--preserve-credentials", "--mount"]
    if shutil.which("unshare") and shutil.which("nsenter"):
        for unshare, enters in (as_root, as_anybody):
            tried = [*unshare, "mount", "-t", "tmpfs", "none", "/tmp"]
            if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
                return unshare, enters
    pytest.skip("no process gets mounts of its own here: unshare --mount")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    try:
        found.add()
        found.wait_for(1)
        found.add()
        found.wait_for(2)
        yield found
    finally:
        found.end()
