"""Writing a figure to a file, as what the file's name says."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from lora_tool.execution.folder import errors_of_the_system, replace_file

_SETTINGS = {"svg.hashsalt": "lora-tool", "pdf.fonttype": 42}
"""The same figure gives the same bytes, and a PDF has fonts that can be edited."""
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_DOTS = 150
"""Per inch, in a PNG."""
_HIGHEST = 60_000
"""Dots of a PNG's height: what draws it takes no 65,536."""


def save(figure: Figure, path: Path) -> None:
    """Write `figure` as an SVG or PDF where `path` ends so, else as a PNG.

    It appears complete or not at all, and replaces a file of that name. Raises `ExecutionError` where it cannot.
    """
    kind = path.suffix if path.suffix in _UNDATED else ".png"
    picture = io.BytesIO()
    with rc_context(_SETTINGS):
        dots = min(_DOTS, _HIGHEST / figure.get_figheight())
        figure.savefig(picture, format=kind[1:], dpi=dots, metadata=_UNDATED.get(kind))
    replace_file(path, picture.getvalue())


def in_folder(path: Path, name: str) -> Path:
    """Return the PNG called `name` in the folder `path`, which is made where it is not there. Raises `ExecutionError`."""
    with errors_of_the_system(None, path):
        path.mkdir(parents=True, exist_ok=True)
    return path / f"{name}.png"
