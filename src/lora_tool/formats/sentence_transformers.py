"""The files that sentence-transformers adds to a transformer: the modules that follow it, and each module's files.

`modules.json` is a list of modules in their order, each with a `path` inside the folder ("" for the folder itself,
where the transformer lies) and a `type`, the class. Format: sentence-transformers 2 to 6, `base/model.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, Defect
from lora_tool.formats.files import read_json, require_inside, require_own_file

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
_TRANSFORMER = re.compile(r"sentence_[\w-]+_config\.json\Z")
_BARE_NAME = re.compile(r"\w[\w.-]*\Z")
_OWN_TYPES = "sentence_transformers."
_EMPTY = ".Normalize"
_LOGITS = ".LogitScore"


class Modules(Struct, frozen=True, kw_only=True):
    """A `modules.json`. `folders` are bare names, one per module that is not the transformer."""

    root: Path
    folders: tuple[str, ...]
    without_files: frozenset[str]
    """Folders of modules that may have nothing to save: an empty folder is lost on its way through the Hub."""
    foreign: tuple[str, ...]
    """Classes that are not sentence-transformers' own: it loads them as code."""


class ModuleFiles(Struct, frozen=True, kw_only=True):
    """Paths in one module's folder, relative to the model's, with `/`: those that belong to it, and those left out."""

    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def root_files(names: Iterable[str]) -> tuple[str, ...]:
    """Return which of the file names are sentence-transformers' own."""
    return tuple(name for name in names if name in (MODULES, SETTINGS) or _TRANSFORMER.match(name))


def read_modules(root: Path) -> Modules:
    """Return the modules in `modules.json` of `root`.

    Raises `CorruptFile` where it is not a list of modules, names anything but bare folder names, or places the
    transformer in another folder than `root`: sentence-transformers would not load a model merged into `root`.
    """
    path = root / MODULES
    require_own_file(root, path)
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise CorruptFile.of(path, Defect.NOT_A_FILE, "is not a list of modules")
    folders = [item.get("path", "") for item in listed]
    types = [str(item.get("type", "")) for item in listed]
    for folder in folders:
        if not isinstance(folder, str) or (folder and not _BARE_NAME.match(folder)):
            message = f"names the folder {folder!r}, which is not the bare name of a folder beside it"
            raise CorruptFile.of(path, Defect.NOT_A_FILE, message)
    if "" not in folders:
        first = folders[0] if folders else "nowhere"
        message = (
            f"says that the transformer lies in {first!r}, not beside it: sentence-transformers would load that one"
        )
        raise CorruptFile.of(path, Defect.NOT_A_FILE, message)
    return Modules(
        root=root,
        folders=tuple(dict.fromkeys(folder for folder in folders if folder)),
        without_files=frozenset(folder for folder, name in zip(folders, types, strict=True) if name.endswith(_EMPTY)),
        foreign=tuple(dict.fromkeys(name for name in types if not name.startswith(_OWN_TYPES))),
    )


class ScoreTokens(Struct, frozen=True, kw_only=True):
    """The tokens whose logits a judge's score is the difference of; without `no` it is one logit."""

    yes: int
    no: int | None


def score_tokens(root: Path) -> ScoreTokens | None:
    """Return the tokens that the module `LogitScore` of a CrossEncoder names (sentence-transformers from 5.4); None
    without one that can be read.
    """
    try:
        listed = read_json(root / MODULES)
        modules = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        folder = next(each.get("path") for each in modules if str(each.get("type")).endswith(_LOGITS))
        path = root / str(folder) / "config.json"
        require_inside(root, path)
        found = read_json(path)
    except (CorruptFile, StopIteration):
        return None
    yes, no = (found.get(name) if isinstance(found, dict) else None for name in ("true_token_id", "false_token_id"))
    return ScoreTokens(yes=yes, no=no if type(no) is int else None) if type(yes) is int else None


def is_cross_encoder(root: Path) -> bool:
    """Whether the settings in `root` are those of a CrossEncoder, whose transformer is a sequence classifier."""
    try:
        require_own_file(root, root / SETTINGS)
        settings = read_json(root / SETTINGS)
    except CorruptFile:
        return False
    return isinstance(settings, dict) and settings.get("model_type") == "CrossEncoder"


def files_of(root: Path, name: str) -> ModuleFiles:
    """Return the files of the module in the folder `name`: none where there is no such folder.

    Left out are code, hidden files, links to folders, and pickles of weights that are also there as safetensors.
    Raises `CorruptFile` for a link out of `root` and for anything but regular files.
    """
    if not (root / name).is_dir():
        return ModuleFiles()
    require_inside(root, root / name)
    kept: list[str] = []
    left: list[str] = []
    for folder, below, files in os.walk(root / name):
        here = Path(folder).relative_to(root)
        left += [f"{here.as_posix()}/{each}/" for each in below if (Path(folder) / each).is_symlink()]
        below[:] = sorted(each for each in below if not each.startswith((".", "__")))
        safe = any(file.endswith(".safetensors") for file in files)
        for file in sorted(files):
            out = file.startswith(".") or file.endswith((".py", ".pyc")) or (safe and file.endswith(".bin"))
            (left if out else kept).append((here / file).as_posix())
    for each in kept:
        require_own_file(root, root / each)
    return ModuleFiles(kept=tuple(kept), left=tuple(left))
