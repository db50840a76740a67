"""The list of framework versions that trainers put at the end of a model card: ``- PEFT 0.21.2``, ``- TRL: 1.16.0``."""

from __future__ import annotations

import re
from pathlib import Path

from lora_tool.core.errors import CorruptFile
from lora_tool.formats.files import read_all

FILE_NAME = "README.md"

_LONGEST = 1 << 20
"""A file with more bytes is not a model card."""
_HEADING = re.compile(r"^#+\s*framework versions\s*$", re.IGNORECASE | re.MULTILINE)
_LINE = re.compile(r"^[-*]\s*(?P<name>[A-Za-z][\w.-]{1,30}):?\s+(?P<version>\d[\w.+!-]{0,40})\s*$", re.MULTILINE)
_PACKAGES = {"pytorch": "torch"}
"""Names of frameworks that are not those of their packages."""


def framework_versions(path: Path) -> dict[str, str]:
    """Return package → version as the card in the file `path` lists them; nothing where it cannot be read."""
    try:
        text = read_all(path, limit=_LONGEST).decode("utf-8", "replace")
    except (CorruptFile, OSError):
        return {}
    *_, last = _HEADING.split(text)
    if last == text:
        return {}
    section = re.split(r"^#", last, maxsplit=1, flags=re.MULTILINE)[0]
    found = {match["name"].lower(): match["version"] for match in _LINE.finditer(section)}
    return {_PACKAGES.get(name, name): version for name, version in found.items()}
