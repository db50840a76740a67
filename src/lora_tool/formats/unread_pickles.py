"""The names in pickles of which lora-tool reads nothing else: a trainer's states, and files of older formats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lora_tool.core.errors import Problem
from lora_tool.formats.files import open_regular, read_at
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pickle_objects import Global
from lora_tool.formats.pickles import names_in
from lora_tool.formats.torch_zip import LARGEST, pickles_in


def foreign_calls(path: Path) -> Iterator[Problem]:
    """Yield the problem of a file, of torch's formats or of pickles, that calls what no checkpoint needs.

    None of a file that is neither. With `.metadata` come the objects that it names. Raises `CorruptFile` for what is not a
    readable, regular file.
    """
    found: dict[Global, bool] = {}
    for pickled in _pickles(path):
        found |= names_in(pickled)
    yield from problems_of(path, found)
    if path.name.endswith(".metadata"):
        from lora_tool.formats.dcp_objects import objects_beside  # few files are such

        yield from objects_beside(path)


def _pickles(path: Path) -> Iterator[bytes]:
    with open_regular(path) as fd:
        if read_at(path, fd, 0, 2) != b"PK":
            yield read_at(path, fd, 0, min(os.fstat(fd).st_size, LARGEST))
            return
        with os.fdopen(os.dup(fd), "rb") as file:
            yield from pickles_in(file)
