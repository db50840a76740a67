"""Workers end with the command that started them, also where that is killed without a word: SIGKILL, out of memory.

It holds a named pipe of the job's folder open. The system closes it with the process, however that ends, and workers,
whoever launched them, read its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PIPE = "lifeline"
_PATIENCE = 20.0
"""Seconds that a worker has for what it does at SIGTERM, such as a last checkpoint."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep the workers of the job in `folder` alive meanwhile; where the file system has no pipes, they live on their own."""
    with contextlib.ExitStack() as closing:
        with contextlib.suppress(OSError):
            os.mkfifo(folder / _PIPE)
            reading = os.open(folder / _PIPE, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that nobody reads cannot be opened
            closing.callback(os.close, os.open(folder / _PIPE, os.O_WRONLY))
            os.close(reading)
        yield


def follow(folder: Path) -> None:
    """Have this process end, and `folder` go, when the process that holds the pipe there has ended."""
    with contextlib.suppress(OSError):
        pipe = os.open(folder / _PIPE, os.O_RDONLY | os.O_NONBLOCK)
        threading.Thread(target=_end_with, args=(pipe, folder), daemon=True).start()


def _end_with(pipe: int, folder: Path) -> None:
    select.select([pipe], [], [])
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
