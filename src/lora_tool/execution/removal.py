"""Removing a folder so that nobody ever sees half of it under its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lora_tool.errors import ExecutionError, OutputExists
from lora_tool.execution.folder import set_aside


def remove(folder: Path, *, trash: Path | None = None) -> None:
    """Remove `folder`, or move it into `trash`, which is made if it is not there.

    It leaves its name at once, by a rename to a hidden sibling, and is removed from there. Raises `OutputExists` where
    `trash` has something of that name, `ExecutionError` where it cannot be moved or removed.
    """
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.lora-tool-removed")
    try:
        for left in folder.parent.glob(".*.lora-tool-removed"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if trash is None:
            shutil.rmtree(hidden if set_aside(folder, hidden) else folder)
            return
        require_room(folder, trash)
        trash.mkdir(parents=True, exist_ok=True)
        # on another disk it is copied: until all of it is there, it does not have its name
        partial = trash / hidden.name
        shutil.move(folder, partial)
        partial.rename(trash / folder.name)
    except OSError as error:
        raise ExecutionError(f"{error.filename or folder} cannot be removed: {error.strerror or error}") from error


def require_room(folder: Path, trash: Path) -> None:
    """Return if `folder` can be moved into `trash` under its name. Raises `OutputExists`."""
    target = trash / folder.name
    if os.path.lexists(target):
        raise OutputExists(f"{target} exists already", hint="give another folder: --trash DIR")
