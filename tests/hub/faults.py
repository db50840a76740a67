"""Faults that the Hub of the tests commits on request: statuses, dropped connections, delays, flipped bytes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What happens to requests whose ``METHOD /path`` matches `on`: `times` times, after `skip` that go well.

    `drop` "before" closes the connection without reading, "body" in the middle of the request's body, "after" when
    the request was carried out but before its answer. `action` runs before the request is carried out, `corrupt`
    changes a body on its way to the store.
    """

    on: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b'{"error":"fault of the test"}'
    drop: str | None = None
    delay: float = 0
    action: Callable[[], object] | None = None
    corrupt: Callable[[bytes], bytes] | None = None


class Faults:
    """The faults still to happen, asked by every request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._planned.append(fault)

    def clear(self) -> None:
        with self._lock:
            self._planned.clear()

    def next(self, method: str, path: str) -> Fault | None:
        """Return the fault that this request meets, and count it."""
        with self._lock:
            for fault in self._planned:
                if fault.times and re.search(fault.on, f"{method} {path}"):
                    if fault.skip:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None


def flip(data: bytes) -> bytes:
    """Return `data` with its last byte changed."""
    return data[:-1] + bytes([data[-1] ^ 0xFF]) if data else data
