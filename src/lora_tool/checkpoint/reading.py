"""What adapters and models are read from alike: a config that may be missing, and weights that may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lora_tool.checkpoint.folders import Folder
from lora_tool.errors import BadConfig, BrokenFile, Defect, Problem
from lora_tool.formats.files import require_inside
from lora_tool.formats.weights import Weights

Config = TypeVar("Config")


def read_config(folder: Folder, name: str, read: Callable[[Path], Config]) -> tuple[Config | None, tuple[Problem, ...]]:
    """Return what `read` makes of the file `name` of the folder, None where it cannot be read, and what is wrong."""
    path = folder.root / name
    try:
        if name not in folder.files:
            raise BadConfig.of(path, Defect.BAD_FIELD, "is missing")
        require_inside(folder.root, path)
        config = read(path)
    except BrokenFile as error:
        return None, (error.problem,)
    return config, getattr(config, "problems", ())


def without_weights(folder: Folder, expected: str, message: str = "is missing") -> Weights:
    """Return the weights of a folder without the file `expected`: none, and the problem that says so."""
    problem = Problem(defect=Defect.NO_WEIGHTS, path=str(folder.root / expected), message=message)
    return Weights(files=(), tensors={}, problems=(problem,))
