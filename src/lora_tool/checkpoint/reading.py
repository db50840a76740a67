"""What adapters and models are read from alike: a config that may be missing, and weights that may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lora_tool.checkpoint.folders import Folder
from lora_tool.errors import BrokenFile, Defect, Problem
from lora_tool.formats.files import inside
from lora_tool.formats.weights import Weights

Config = TypeVar("Config")


def read_config(folder: Folder, name: str, read: Callable[[Path], Config]) -> tuple[Config | None, tuple[Problem, ...]]:
    """Return what `read` makes of the file `name` of the folder, or None and what is wrong with the file."""
    path = folder.root / name
    if name not in folder.files:
        problem = Problem(defect=Defect.BAD_FIELD, path=str(path), message="is missing")
        return None, (problem,)
    if not inside(folder.root, path):
        return None, (Problem(defect=Defect.NOT_A_FILE, path=str(path), message="is a link out of its folder"),)
    try:
        return read(path), ()
    except BrokenFile as error:
        return None, (error.problem,)


def no_weights(folder: Folder, expected: str, message: str = "is missing") -> Weights:
    """Return the weights of a folder without the file `expected`: none, and the problem that says so."""
    problem = Problem(defect=Defect.NO_WEIGHTS, path=str(folder.root / expected), message=message)
    return Weights(files=(), tensors={}, problems=(problem,))
