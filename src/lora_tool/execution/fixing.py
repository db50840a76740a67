"""Change an existing file: write the new one next to it, keep the old one under another name, and rename."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

from lora_tool.core.errors import SourceChanged
from lora_tool.execution.folder import copy_file, errors_of_the_system, sync_folder
from lora_tool.formats.files import open_regular, read_at
from lora_tool.rules.changes import FileDiff


def apply_change(change: FileDiff) -> Path:
    """Write the file as `change` has it, whole or not at all, and return the path of the kept original.

    The original is kept as `FILE.orig`, or as the first of `FILE.orig2`, … that does not exist yet. Raises
    `SourceChanged` if the file changed after `change` was made, `ExecutionError` and `OutOfSpace`.
    """
    path = change.path
    partial = path.with_name(f".{path.name}.{os.getpid()}.lora-tool-partial")
    with errors_of_the_system(f"{path} cannot be changed", path):
        try:
            with open_regular(path) as fd, partial.open("xb") as new:
                if os.fstat(fd).st_size != change.size or read_at(path, fd, 0, len(change.old)) != change.old:
                    raise SourceChanged(f"{path} has changed since it was checked", hint="check it again")
                new.write(change.new)
                with open(fd, "rb", closefd=False) as rest:
                    rest.seek(len(change.old))
                    shutil.copyfileobj(rest, new)
                new.flush()
                os.fsync(new.fileno())
            shutil.copymode(path, partial)
            kept = _kept(path)
            try:
                partial.replace(path)
            except OSError:
                kept.unlink()
                raise
            sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    return kept


def _kept(path: Path) -> Path:
    """Give the file a second name, or copy it where the file system has no links; return that name."""
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.orig{number if number > 1 else ''}")
        try:
            with contextlib.suppress(FileExistsError):
                kept.hardlink_to(path)
                return kept
        except OSError:
            with contextlib.suppress(FileExistsError):
                copy_file(kept, path)
                return kept
    raise AssertionError("there is always a number more")
