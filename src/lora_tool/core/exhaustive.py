"""The end of a `match` that must know every case: mypy reports what may arrive here."""

from __future__ import annotations

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """Raise `AssertionError`: `value` is of a kind that the `match` above forgot. `typing` has it since Python 3.11."""
    raise AssertionError(f"{type(value).__name__} is not handled")
