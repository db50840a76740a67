"""A real Ray cluster of two nodes on this machine, each with a loopback address of its own, the second with its own mounts."""

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
from functools import cache
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lora-tool[ray]'")
ROOT = Path(__file__).parents[2]
START_S = 90.0


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
            "RAY_health_check_failure_threshold": "2",  # a killed node is known to be lost after a second
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "5000",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def add(self, *, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a node and return its group's first process; `within` is the command that starts it."""
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", "--no-monitor", f"--temp-dir={self.place}"]
            if not self.nodes
            else [f"--address={self.address}"]
        )
        command = [*within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *where]
        command += [f"--node-ip-address=127.0.0.{20 + len(self.nodes)}", "--include-log-monitor=false"]
        with (self.place / f"node{len(self.nodes)}.log").open("wb") as log:
            self.nodes.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
            )
        return self.nodes[-1]

    def wait_for_head(self) -> None:
        """Return when the first node takes connections."""
        limit = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.20", self.port), timeout=1):
                return
            assert time.monotonic() < limit, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """Return what the nodes have said."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.place.glob("node*.log")))

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


@contextlib.contextmanager
def mounted(node: subprocess.Popen[bytes], *arguments: str | Path) -> Iterator[None]:
    """Mount something on a node that has its own mounts, the last of `arguments` is where: `mount ARGUMENTS`."""
    _, enters = own_mounts()

    def run(*command: str) -> None:
        subprocess.run(["nsenter", f"--target={node.pid}", *enters, *command], check=True)

    run("mount", *map(str, arguments))
    try:
        yield
    finally:
        run("umount", "--lazy", str(arguments[-1]))


@cache
def own_mounts() -> tuple[Sequence[str], Sequence[str]]:
    """Return the command that gives a process mounts of its own, and options of `nsenter` to change them.

    Both are empty where nobody may mount.
    """
    as_root = ["unshare", "--mount"], ["--mount"]
    as_anybody = ["unshare", "--mount", "--map-root-user"], ["--user", "--preserve-credentials", "--mount"]
    if shutil.which("unshare") and shutil.which("nsenter"):
        for unshare, enters in (as_root, as_anybody):
            tried = [*unshare, "mount", "-t", "tmpfs", "none", "/tmp"]
            if subprocess.run(tried, capture_output=True, check=False).returncode == 0:
                return unshare, enters
    return [], []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The nodes, one of which may have started a little later."""
    found = Cluster()
    try:
        found.add()
        found.wait_for_head()
        found.add(within=own_mounts()[0])
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def joined(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with both nodes, which this process has joined: no test waits for that again."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        before = signal.getsignal(signal.SIGTERM)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        signal.signal(signal.SIGTERM, before)
        try:
            limit = time.monotonic() + START_S
            while sum(node["Alive"] for node in ray.nodes()) != len(cluster.nodes):
                assert time.monotonic() < limit, cluster.logs()
                time.sleep(0.1)
            yield cluster
        finally:
            ray.shutdown()
