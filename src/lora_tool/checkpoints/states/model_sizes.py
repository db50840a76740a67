"""The sizes in the trained model's config, where it lies next to the pieces."""

from __future__ import annotations

from pathlib import Path

from lora_tool.core.errors import BrokenFile
from lora_tool.formats import model_config
from lora_tool.formats.files import is_file, read_object


def size_near(name: str, *folders: Path) -> int | None:
    """Return the size `name`, "hidden_size" say, in the first config.json that the folders have; None where none says it."""
    path = next((path for folder in folders if is_file(path := folder / model_config.FILE_NAME)), None)
    if path is None:
        return None
    try:
        found = read_object(path)
    except BrokenFile:
        return None
    text = found.get("text_config")
    tables = [found, text if isinstance(text, dict) else {}]
    size = next((table[name] for table in tables if name in table), None)
    return size if type(size) is int and size > 0 else None
