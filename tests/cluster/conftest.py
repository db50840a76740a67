"""A real Ray cluster of two nodes on this machine, each with a loopback address of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lora-tool[ray]'")
ROOT = Path(__file__).parents[2]


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

    def add(self) -> subprocess.Popen[bytes]:
        """Start a node and return its group's first process."""
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.place}"]
            if not self.nodes
            else [f"--address={self.address}"]
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        command += [*where, f"--node-ip-address=127.0.0.{20 + len(self.nodes)}", "--disable-usage-stats"]
        with (self.place / f"node{len(self.nodes)}.log").open("wb") as log:
            self.nodes.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )
        return self.nodes[-1]

    def wait_for(self, count: int) -> None:
        """Return when so many nodes are there."""
        asked = f"import ray; ray.init({self.address!r}, logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))"
        limit = time.monotonic() + 90
        while time.monotonic() < limit:
            said = subprocess.run(
                [sys.executable, "-c", asked], env=self.environment, capture_output=True, text=True, check=False
            )
            if said.stdout.strip().endswith(str(count)):
                return
        raise AssertionError(f"no {count} nodes: {said.stdout}{said.stderr}")

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            try:
                node.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
        shutil.rmtree(self.place, ignore_errors=True)


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
