"""Small compiled libraries, of one function each, that Python can do without: `build_kernel.py` says which there are."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any


def is_off() -> bool:
    """Return whether `LORA_TOOL_KERNEL` says that nothing compiled is used."""
    return os.environ.get("LORA_TOOL_KERNEL", "").lower() == "off"


def function_of(file: Path, name: str, version: int) -> Any | None:  # noqa: ANN401 - ctypes gives functions by name
    """Return the library's function of that name; None where it is not there, or `NAME_version` tells another one."""
    try:
        library = ctypes.CDLL(str(file))
        return library[name] if library[f"{name}_version"]() == version else None
    except (OSError, AttributeError):
        return None
