"""How long work reports to those who wait, and decisions to those who ask why: the types of what they pass in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call, from any thread."""

Watch = Callable[[int], AbstractContextManager[Progress]]
"""Called once with the number of bytes that will be read; returns a context manager of the `Progress` of that work."""

StageWatch = Callable[[str, int], AbstractContextManager[Progress]]
"""A `Watch` that also takes a description of the work."""


def unwatched(_what: str, _nbytes: int) -> nullcontext[Progress]:
    """Return a progress that shows nothing: the `StageWatch` of those who do not wait."""
    return nullcontext(lambda _: None)


listener: ContextVar[Callable[[str], None]] = ContextVar("listener", default=lambda _: None)
"""Who hears what a wait that has no progress is for: nobody, unless a command line sets it."""


reasons: ContextVar[Callable[[str], None]] = ContextVar("reasons", default=lambda _: None)
"""Who hears what was decided, and why: nobody, unless a command was asked to be verbose."""


def decided(what: str) -> None:
    """Say what was decided and why, in one line, to whoever wants to know."""
    reasons.get()(what)


def told(what: str) -> None:
    """Say what is waited for, in one line, to whoever listens."""
    listener.get()(what)
