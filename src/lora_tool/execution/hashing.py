"""Hashes of files that are read whole, begun while the plan is made: one core has nothing else to do then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType

from lora_tool.plans.core.manifest import sha256_of

_BEGUN: ContextVar[Mapping[Path, Future[str]]] = ContextVar("_BEGUN", default=MappingProxyType({}))


@contextlib.contextmanager
def hashed_meanwhile(paths: Iterable[Path]) -> Iterator[None]:
    """Hash the files beside what is done inside; what is not finished then is given up. `hash_of` has the results."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        token = _BEGUN.set({path: thread.submit(sha256_of, path, ended.is_set) for path in paths})
        try:
            yield
        finally:
            _BEGUN.reset(token)
            ended.set()
            thread.shutdown(cancel_futures=True)


def hash_of(path: Path, workers: Executor) -> Future[str]:
    """Return the file's sha256, in hex, that was begun already, or is now by one of the workers."""
    return _BEGUN.get().get(path) or workers.submit(sha256_of, path)
