"""Reading values in several threads, which all stop when one of them is stopped."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol, TypeVar

from lora_tool.core.machine import available_cores
from lora_tool.core.progress import Progress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reading(Protocol[T_co]):
    """Anything that reads values in a thread of its own."""

    def run(self, advance: Progress) -> Sequence[T_co]:
        """Return what the values show. `advance` is called with the bytes, and may raise to stop it."""


def run_parts(parts: Sequence[Reading[T]], advance: Progress) -> list[T]:
    """Run all parts, some at the same time, and return their results in the order of the parts. Raises what they raise."""
    from concurrent.futures import CancelledError, ThreadPoolExecutor  # slow, and plans do not run

    stop = threading.Event()

    def go_on(nbytes: int) -> None:
        if stop.is_set():
            raise CancelledError
        advance(nbytes)

    with ThreadPoolExecutor(min(4, available_cores())) as workers:
        try:
            found = [*workers.map(lambda part: part.run(go_on), parts)]
        except BaseException:
            stop.set()
            raise
    return [result for part in found for result in part]
