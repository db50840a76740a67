"""How long work reports to those who wait: the types of what they pass in."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[int], None]
"""Called with the number of bytes done since it was called last, from any thread."""

Watch = Callable[[int], AbstractContextManager[Progress]]
"""Called once with the number of bytes that will be read; returns a context manager of the `Progress` of that work."""

StageWatch = Callable[[str, int], AbstractContextManager[Progress]]
"""A `Watch` that is also given what is done, in words."""


def unwatched(_what: str, _nbytes: int) -> nullcontext[Progress]:
    """Return a progress that shows nothing: the `StageWatch` of those who do not wait."""
    return nullcontext(lambda _: None)
