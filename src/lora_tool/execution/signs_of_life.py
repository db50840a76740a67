"""What a share at work leaves in the folder's journal again and again, because not every network storage has locks."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator

from lora_tool.cluster.share import Share
from lora_tool.errors import OutputExists
from lora_tool.execution.journal import Journal

_BEAT_S = 10.0
_DEAD_S = 60.0
"""A share on another machine that has left no sign of life for so long has ended."""
_SIGN = ".at-work"


@contextlib.contextmanager
def at_work(journal: Journal, share: Share) -> Iterator[None]:
    """Leave a sign of life in the journal again and again."""
    host, process = platform.node(), os.getpid()
    name = f"{share.number}-of-{share.of}.{host}.{process}{_SIGN}"
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                (journal.path / name).touch()

    journal.note(name, {"share": str(share), "host": host, "process": process})
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        (journal.path / name).unlink(missing_ok=True)


def require_all_ended(journal: Journal) -> None:
    """Return if no share is at work in the folder. Raises `OutputExists` with one that is.

    Of another machine only its sign of life is known, and the time that the storage gives to it and to a file written
    now: clocks of machines are not compared.
    """
    signs = list(journal.path.glob(f"*{_SIGN}"))
    if not signs:
        return
    journal.note("now", "")
    now = (journal.path / "now").stat().st_mtime
    for sign in signs:
        said = journal.noted(sign.name)
        age = now - sign.stat().st_mtime
        here = said.get("host") == platform.node()
        if _runs(said.get("process")) if here else age < _DEAD_S:
            raise OutputExists(
                f"part {said.get('share')} is at work on {said.get('host')} (process {said.get('process')}, last sign "
                f"{max(0, age):.0f} s ago): {journal.folder}",
                hint="wait until all parts have ended, then run the same command again",
            )


def _runs(process: object) -> bool:
    """Return whether a process of this machine is there."""
    try:
        os.kill(int(str(process)), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return True
