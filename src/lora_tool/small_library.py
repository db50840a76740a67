"""Small compiled libraries, of a function or two each, that Python can do without: `build_kernel.py` says which there are."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any


def is_off() -> bool:
    """Return whether `LORA_TOOL_KERNEL` says that nothing compiled is used."""
    return os.environ.get("LORA_TOOL_KERNEL", "").lower() == "off"


def functions_of(file: Path, version: int, *names: str) -> tuple[Any, ...] | None:
    """Return the library's functions of these names; None where one is not there, or `NAME_version` of the first tells another."""
    try:
        library = ctypes.CDLL(str(file))
        return tuple(library[name] for name in names) if library[f"{names[0]}_version"]() == version else None
    except (OSError, AttributeError):
        return None
