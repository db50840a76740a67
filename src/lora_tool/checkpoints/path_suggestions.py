"""The error for a path that does not lead to a folder, with the name that was probably meant."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from lora_tool.core.errors import NotACheckpoint
from lora_tool.formats.files import expanded

Fits = Callable[[Path], bool]
_MOST_NAMES = 10_000
"""Names of a folder that are compared: it may be anybody's."""


def no_such_folder(path: str | Path, looked_in: str = "", *, fits: Fits = os.path.isdir) -> NotACheckpoint:
    """Return the error for a path where nothing is; `looked_in` is added to it in brackets."""
    if os.path.islink(path):  # noqa: PTH114 - it raises for long names
        return NotACheckpoint(f"{path} is a link to {Path(path).readlink()}, which leads to no folder")
    return NotACheckpoint(
        f"{path}: no such folder{f' ({looked_in})' if looked_in else ''}", hint=probably_meant(path, fits)
    )


def not_a_folder(path: str | Path) -> NotACheckpoint:
    """Return the error for a file, which is often named where its folder is meant."""
    return NotACheckpoint(f"{path} is a file, not a folder", hint=f"name its folder: {Path(path).parent}")


def probably_meant(path: str | Path, fits: Fits = os.path.isdir) -> str | None:
    """Return a question that names the folder that `fits` and whose name is the closest, None where none is close.

    The first part of the path that is not there is taken for the mistake; the rest of it has to be there.
    """
    import difflib  # only needed for misspelled names

    wanted = expanded(path)
    rest: list[str] = []
    for part in (wanted, *wanted.parents):
        if part.parent.is_dir():
            for name in difflib.get_close_matches(part.name, _folders(part.parent), n=3):
                meant = part.parent.joinpath(name, *rest)
                if meant.is_dir() and _composed(name) == _composed(part.name):
                    return f"the name is there with its accents encoded in another way: {_in_ascii(meant)}"
                if fits(meant):
                    return f"did you mean {meant}?"
            return None
        rest.insert(0, part.name)
    return None


def _composed(name: str) -> str:
    """Return the name in one Unicode form: macOS and archives made there take letter and accent apart, keyboards do not."""
    import unicodedata  # only needed for misspelled names

    return unicodedata.normalize("NFC", name)


def _in_ascii(path: Path) -> str:
    """Return the path as bash and zsh accept it, with letters outside ASCII as escapes, because some look alike."""
    text = str(path).replace("\\", r"\\").replace("'", r"\'")
    return "$'" + "".join(each if each.isascii() else f"\\U{ord(each):08x}" for each in text) + "'"


def _folders(parent: Path) -> list[str]:
    try:
        with os.scandir(parent) as entries:
            return [entry.name for entry in itertools.islice(entries, _MOST_NAMES) if entry.is_dir()]
    except OSError:
        return []
