"""Subnormal numbers and rounding in this thread, whatever mode another library has set: torch and -ffast-math can."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache

_ENVIRONMENT_BYTES = 256
"""More than any `fenv_t`."""


@contextlib.contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Keep subnormal numbers and round to nearest, ties to even, inside; the thread's own mode comes back after.

    Nothing is changed where the C library does not tell how: elsewhere than on Linux and macOS, x86-64 and arm64.
    """
    found = _c_library()
    if found is None:
        yield
        return
    get, put, default = found
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    get(before)
    put(default)
    try:
        yield
    finally:
        put(before)


@lru_cache
def _c_library() -> tuple[Callable[..., int], Callable[..., int], ctypes.c_void_p] | None:
    """Return C's `fegetenv` and `fesetenv`, and its FE_DFL_ENV, which has flush-to-zero off (C11, 7.6)."""
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return None
    try:
        library = ctypes.CDLL(None)
        get, put = library.fegetenv, library.fesetenv
        of_macos = ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV")) if sys.platform == "darwin" else None
    except (OSError, AttributeError, ValueError):
        return None
    return get, put, ctypes.c_void_p(of_macos or -1)  # glibc and musl have -1
