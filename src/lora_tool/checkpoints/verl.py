"""verl's checkpoints: a run with `global_step_N`, in it `actor` and perhaps `critic`, in them one file for each rank.

SkyRL writes the same files, and calls the actor `policy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, ShardedDir, ShardedKind, read_pointer, step_of
from lora_tool.core.errors import BrokenFile
from lora_tool.formats.files import read_object

MODEL_FILE = re.compile(r"model_world_size_(?P<ranks>\d{1,6})_rank_(?P<rank>\d{1,6})\.pt\Z")
_POINTERS = ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_CONFIG = "fsdp_config.json"
_STEP = re.compile(r"global_step_\d+\Z")
_ROLES = ("actor", "policy", "critic")


def _recognise(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if next(_tags(folder), None) else None


def _tags(folder: Folder) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each folder with rank files, as it is called from here, and their names; the actor before the critic."""
    steps = sorted(filter(_STEP.match, folder.folders), key=step_of)
    for tag in (".", *(role for role in _ROLES if role in folder.folders), *steps):
        listed = folder.names_in(tag)
        inside = [f"{tag}/{role}" for role in _ROLES if role in listed] if tag in steps else []
        for place, names in ((tag, listed), *((place, folder.names_in(place)) for place in inside)):
            found = tuple(sorted(filter(MODEL_FILE.match, names)))
            if found:
                yield place, found


def _open(folder: Folder) -> ShardedDir:
    tags = dict(_tags(folder))
    return ShardedDir(
        kind=VERL, folder=folder, rank_files=tags, latest=_latest(folder, tuple(tags)), problems=folder.problems
    )


def _latest(folder: Folder, tags: tuple[str, ...]) -> str | None:
    """Return the actor of the step that the run points at."""
    pointer = pointer_of(folder)
    text = read_pointer(folder.root / pointer) if pointer in folder.files else None
    if text is None:
        return None
    step = f"global_step_{text}"
    return next((tag for tag in (*(f"{step}/{role}" for role in _ROLES), step) if tag in tags), step)


def pointer_of(folder: Folder) -> str:
    """Return the name of the file that names the newest step of a run: verl's, where SkyRL's does not lie there."""
    return _POINTERS[_POINTERS[1] in folder.files]


def ranks_of(folder: Folder) -> int | None:
    """Return how many processes saved the rank files in the folder, None where verl's config does not say it."""
    if _CONFIG not in folder.files:
        return None
    try:
        world_size = read_object(folder.root / _CONFIG).get("world_size")
    except BrokenFile:
        return None
    return world_size if type(world_size) is int and world_size > 0 else None


VERL = ShardedKind(
    name="verl checkpoint",
    sign="global_step_N/actor",
    landmarks=(_CONFIG, *(f"model_world_size_{2**power}_rank_0.pt" for power in range(11))),
    weights=("model_world_size_*_rank_*.pt",),
    optimizer=("optim_world_size_*_rank_*.pt",),
    others=("extra_state_world_size_*_rank_*.pt", _CONFIG, "lora_train_meta.json", *_POINTERS),
    folders=("global_step_[0-9]*",),
    steps=_STEP,
    recognise=_recognise,
    open=_open,
)
