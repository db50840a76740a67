"""Whether a Ray cluster can be reached, which is asked before Ray is: it waits for minutes where nothing answers."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from lora_tool.core.errors import ExecutionError

START = "start one with `ray start --head`, or give the address that it printed: `address=HOST:PORT`"
_SUBMIT = "send the command to the cluster: ray job submit --address http://HEAD:8265 -- lora-tool …"
JOIN = f"join it: ray start --address=HOST:PORT; or {_SUBMIT}"
_CONNECT_S = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "::1"})
_PROCESSES = Path("/proc")
_HEAD = re.compile(r"\0--gcs-address=([^\0]+)")
"""What a node's command line says of its cluster."""
_SETTINGS = b"\x04"
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
"""The preface of HTTP/2, and settings of which there are none."""


def require_head(where: str) -> None:
    """Return if what listens at the address HOST:PORT may be a cluster's head: Ray itself would wait for minutes.

    Raises `ExecutionError`.
    """
    if "://" in where:
        whose = "the dashboard" if where.startswith("http") else "Ray's client, which is not supported"
        raise ExecutionError(f"{where} is an address of {whose}", hint=f"give HOST:PORT of the cluster, or {_SUBMIT}")
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise ExecutionError(f"{where!r} is not the address of a Ray cluster; expected HOST:PORT", hint=START)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as server:
            speaks = os.environ.get("RAY_USE_TLS") == "1" or _speaks_grpc(server)
    except (OSError, OverflowError) as error:
        raise ExecutionError(f"no Ray cluster answers at {where}: {error}", hint=START) from error
    if not speaks:
        raise ExecutionError(f"what answers at {where} is not the head of a Ray cluster", hint=START)


def is_same_address(asked: str, joined: str) -> bool:
    """Return whether HOST:PORT, as somebody typed it, can mean a cluster that was joined at the address `joined`.

    Of 127.0.0.1 only the port is compared: Ray puts the machine's outward address in its place.
    """
    (host, _, port), (other_host, _, other_port) = asked.rpartition(":"), joined.rpartition(":")
    numbers = _numbers(host)
    return port == other_port and (bool(numbers & _LOOPBACK) or not numbers.isdisjoint(_numbers(other_host)))


def _numbers(host: str) -> set[str]:
    """Return the IP addresses of a host, none for one that nobody knows."""
    try:
        return {str(place[0]) for *_, place in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _speaks_grpc(server: socket.socket) -> bool:
    """Return whether a program answers as HTTP/2 does: with a frame of settings (RFC 9113, 3.4)."""
    server.sendall(_GREETING)
    with server.makefile("rb") as answers:
        return answers.read(4)[3:] == _SETTINGS


def require_node(where: str) -> None:
    """Return if a node of the cluster at `where` runs on this machine, or nobody can tell: Ray looks for one for a minute.

    Nobody can where the system has no /proc, or hides other users' processes: the first is then not to be seen. Of two
    clusters only the ports are compared, because a head may have several names. Raises `ExecutionError`.
    """
    commands = _PROCESSES.glob("[0-9]*/comm")
    nodes = [each.with_name("cmdline") for each in commands if _content(each) == "raylet\n"]
    if _content(_PROCESSES / "1" / "comm") and not nodes:
        raise ExecutionError(
            "no Ray node runs on this machine, and Ray takes tasks only from a machine of its cluster", hint=JOIN
        )
    heads = {head for node in nodes for head in _HEAD.findall(_content(node))}
    if heads and where != "auto" and _port(where) not in map(_port, heads):
        raise ExecutionError(
            f"the Ray node on this machine is one of the cluster at {', '.join(sorted(heads))}, not of that at {where}",
            hint=JOIN,
        )


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process has ended, or is another user's
        return ""
