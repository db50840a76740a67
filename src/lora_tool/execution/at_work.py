"""Signs of life of those who write to one unfinished folder: not every network storage has locks.

Lustre as many clusters mount it has none, or none between machines. Nor do machines agree on the time, or containers on
the numbers of processes: a sign in the folder's journal is watched, and one on which nothing happens was left by a process
that was killed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from lora_tool.core.errors import OutputExists
from lora_tool.core.progress import told
from lora_tool.execution.journal import SIGN, Journal

_BEAT_S = 10.0
_LOOK_S = 1.0
_LOOKS = 30
"""Times that a sign is read, a second apart: long enough for three beats."""


@contextlib.contextmanager
def at_work(journal: Journal, who: str, *, alone: bool) -> Iterator[None]:
    """Leave a sign of life in the journal inside, again and again, in the name of `who`.

    Raises `OutputExists` where another process is at work on the folder, unless both allow others (`alone` False): parts
    of one plan may be written together. It waits up to half a minute for a sign from another machine.
    """
    journal.make()
    sign = journal.path / f"{uuid.uuid4().hex}{SIGN}"
    said = {"who": who, "alone": alone, "host": platform.node(), "process": os.getpid(), "among": _processes()}
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(sign)  # and no new one, in a folder that somebody else has finished

    journal.note(sign.name, said)  # before searching for others: of two that begin at once, each sees the other
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        _require_ended(journal, [each for each in _others(journal, sign) if alone or journal.noted(each).get("alone")])
        yield
    finally:
        ended.set()
        thread.join()
        sign.unlink(missing_ok=True)


def _others(journal: Journal, sign: Path) -> list[str]:
    return sorted(path.name for path in journal.path.glob(f"*{SIGN}") if path != sign)


def _require_ended(journal: Journal, signs: list[str]) -> None:
    """Return once nobody who left one of the signs is at work. Raises `OutputExists` with one who is."""
    watched: dict[str, int] = {}
    for sign in signs:
        said = journal.noted(sign)
        if said.get("among") == _processes() and not _runs(said.get("process")):
            continue
        beat = _last_beat(journal.path / sign)
        if beat is not None:
            watched[sign] = beat
    if watched:
        who = journal.noted(next(iter(watched))).get("who")
        told(f"waiting up to {_LOOKS * _LOOK_S:.0f} s to see whether {who} is still at work: {journal.folder}")
    left = _LOOKS
    while watched and left:
        time.sleep(_LOOK_S)
        left -= 1
        for sign, before in list(watched.items()):
            beat = _last_beat(journal.path / sign)
            if beat is None:
                del watched[sign]
            elif beat != before:
                said = journal.noted(sign)
                raise OutputExists(
                    f"{said.get('who')} is at work on {said.get('host')} (process {said.get('process')}): "
                    f"{journal.folder}",
                    hint="wait until it has ended, then run the same command again",
                )
    for sign in signs:
        (journal.path / sign).unlink(missing_ok=True)


def _last_beat(sign: Path) -> int | None:
    """Return the time of the last sign, by whatever clock; None where there is none any more."""
    try:
        descriptor = os.open(sign, os.O_RDONLY | os.O_CLOEXEC)  # NFS asks its server when a file is opened
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _processes() -> str:
    """Return the machine's boot id and the PID namespace: process ids can be compared only where both are equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _runs(process: object) -> bool:
    """Return whether a process of that number is there."""
    try:
        os.kill(int(str(process)), 0)
    except (ValueError, ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return True
