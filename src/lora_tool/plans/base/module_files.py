"""The modules of sentence-transformers that go with an embedding model: pooling, normalising, dense layers.

Without them sentence-transformers pools by the mean and reports that in a log line at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from lora_tool.checkpoints import Folder
from lora_tool.core.errors import CorruptFile
from lora_tool.formats.sentence_transformers import (
    MODULES,
    SETTINGS,
    Modules,
    files_of,
    is_cross_encoder,
    read_modules,
    root_files,
)
from lora_tool.plans.base.task import CLASSIFIERS, Task
from lora_tool.plans.core.steps import SideFile, copied_file

_EMBEDDING = frozenset({Task.FEATURE_EXTRACTION, Task.AS_TRAINED, Task.CAUSAL_LM})


class ModuleSideFiles(Struct, frozen=True, kw_only=True):
    """The files to copy, with the notes and warnings about them."""

    files: list[SideFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def module_files(owners: Sequence[tuple[Folder, str]], task: Task) -> ModuleSideFiles:
    """Return the files of sentence-transformers that go with a model for `task`, from the first of `owners` that has each.

    `owners` are the adapters' folders and then the base's, each with what to call it. A classifier has modules only
    where the folder is a CrossEncoder's. Raises `CorruptFile` for one that is not a regular file inside its folder.
    """
    owners = [(folder, whose) for folder, whose in owners if root_files(folder.files)]
    found = ModuleSideFiles()
    if not owners or not _goes_with(task, owners):
        return found
    home = next((owner for owner in owners if MODULES in owner[0].files), None)
    modules: Modules | None = None
    if home is not None:
        try:
            modules = read_modules(home[0].root)
        except CorruptFile as error:
            found.warnings.append(
                f"{error}: the modules of sentence-transformers are not copied, and without them it pools by the mean"
            )
            return found
    taken: set[str] = set()
    for folder, whose in owners:
        for name in root_files(folder.files):
            if name not in taken:
                taken.add(name)
                found.files.append(copied_file(folder.root, name, f"the {whose}"))
    if home is not None and modules is not None:
        _add_folders(found, modules, [home, *(owner for owner in owners if owner is not home)])
    return found


def _goes_with(task: Task, owners: Sequence[tuple[Folder, str]]) -> bool:
    if task in CLASSIFIERS:
        return next((is_cross_encoder(folder.root) for folder, _ in owners if SETTINGS in folder.files), False)
    return task in _EMBEDDING


def _add_folders(found: ModuleSideFiles, modules: Modules, owners: Sequence[tuple[Folder, str]]) -> None:
    """Add the files of each module's folder, all from one owner: the first that has some."""
    for name in modules.folders:
        each = ((folder, whose, files_of(folder.root, name)) for folder, whose in owners)
        folder, whose, files = next((one for one in each if one[2].kept), (None, "", None))
        if folder is None or files is None:
            _say_missing(found, name, modules)
            continue
        found.files.extend(copied_file(folder.root, path, f"the {whose}") for path in files.kept)
        if files.left:
            found.notes.append(f"not copied from the {whose}: {', '.join(files.left)}")
    if modules.foreign:
        found.warnings.append(
            f"{MODULES} names {', '.join(modules.foreign)}, custom code that is not copied: without it "
            f"sentence-transformers cannot load the model; its files are in {modules.root}"
        )


def _say_missing(found: ModuleSideFiles, name: str, modules: Modules) -> None:
    said = f"{MODULES} names `{name}`, which has no files in {modules.root}"
    if name in modules.without_files:
        found.notes.append(f"{said}: it needs none")
    else:
        found.warnings.append(f"{said}: sentence-transformers uses defaults for it, or cannot load the model")
