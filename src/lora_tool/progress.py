"""How those who wait are told of long work: the types of what they pass in."""

from collections.abc import Callable
from contextlib import AbstractContextManager

Progress = Callable[[int], None]
"""Called with the number of bytes done since it was called last, from any thread."""

Watch = Callable[[int], AbstractContextManager[Progress]]
"""Asked once for how many bytes are going to be read, it gives what is told of each block."""
