"""The names in pickles of which lora-tool reads nothing else: a trainer's states, and files of older formats."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lora_tool.core.errors import Problem
from lora_tool.formats.files import open_regular, read_at
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pickle_objects import Global
from lora_tool.formats.pickles import names_in
from lora_tool.formats.torch_zip import ZIP_ERRORS

_LARGEST = 16 << 20
"""Bytes of a pickle that are read: the structure of a checkpoint, whose tensors lie behind it or beside it."""
_MOST_MEMBERS = 64
"""Pickles of one archive that are read; torch's have one."""


def foreign_calls(path: Path) -> Iterator[Problem]:
    """Yield the problem of a file, of torch's formats or of pickles, that calls what no checkpoint needs.

    None of a file that is neither. Raises `CorruptFile` for what is not a readable, regular file.
    """
    found: dict[Global, bool] = {}
    for pickled in _pickles(path):
        found |= names_in(pickled)
    return problems_of(path, found)


def _pickles(path: Path) -> Iterator[bytes]:
    with open_regular(path) as fd:
        if read_at(path, fd, 0, 2) != b"PK":
            yield read_at(path, fd, 0, min(os.fstat(fd).st_size, _LARGEST))
            return
        try:
            with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith(".pkl")]
                for name in names[:_MOST_MEMBERS]:
                    with archive.open(name) as member:
                        yield member.read(_LARGEST)
        except ZIP_ERRORS:
            return  # another rule's
