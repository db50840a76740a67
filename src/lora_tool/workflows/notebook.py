"""Progress in a notebook: a bar on its page, as a command has one on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from threading import Lock
from typing import Any

from lora_tool.core.display import printable, size
from lora_tool.core.progress import Progress, StageWatch, unwatched

_FIRST, _NEXT = 0.5, 0.2
"""Seconds until a bar appears, so that short work shows none, and from one of its states to the next."""


def default_watch() -> StageWatch:
    """Return what shows progress where a program asked for nothing: bars in a notebook, elsewhere nothing."""
    python = sys.modules.get("IPython")  # a notebook has imported it
    shell = python.get_ipython() if python is not None else None
    return notebook_bar if getattr(shell, "kernel", None) is not None else unwatched


@contextmanager
def notebook_bar(what: str, nbytes: int) -> Iterator[Progress]:
    """Show a bar for work on so many bytes, until it ends."""
    from IPython import display

    shown: Any = None
    done, next_at, lock = 0, time.monotonic() + _FIRST, Lock()

    def advance(more: int) -> None:
        nonlocal shown, done, next_at
        with lock:  # it is called from any thread
            done += more
            now = time.monotonic()
            if now < next_at:
                return
            next_at = now + _NEXT
            bar = f'<progress value="{done}" max="{nbytes}"></progress>'
            page = display.HTML(f"{escape(printable(what))} {bar} {size(done)} of {size(nbytes)}")
            if shown is None:
                shown = display.display(page, display_id=True)
            else:
                shown.update(page)

    try:
        yield advance
    finally:
        if shown is not None:
            shown.update(display.HTML(""))
