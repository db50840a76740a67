"""Reading a safetensors header that has to be a good one."""

from __future__ import annotations

from pathlib import Path

from lora_tool.core.errors import CorruptFile
from lora_tool.formats.safetensors import WeightsFile, scan_file


def read_file(path: Path) -> WeightsFile:
    """Return the header of `path`. Raises `CorruptFile` with its first defect if it has any."""
    scanned = scan_file(path)
    if scanned.problems:
        raise CorruptFile(scanned.problems[0])
    return scanned
