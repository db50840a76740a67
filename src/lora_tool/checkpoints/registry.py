"""All kinds of checkpoint: the built-in ones, and those that other packages add."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lora_tool.checkpoints.adapters import ADAPTER
from lora_tool.checkpoints.added import added_kinds
from lora_tool.checkpoints.deepspeed import ZERO
from lora_tool.checkpoints.folders import Folder, is_called_save, is_numbered, read_folder
from lora_tool.checkpoints.fsdp import CUT_SAFETENSORS, DCP, FSDP_FULL, FSDP_RANKS
from lora_tool.checkpoints.gguf_adapter import GGUF_ADAPTER
from lora_tool.checkpoints.kinds import Claim, Kind, RunDir, ShardedKind, matches, step_of
from lora_tool.checkpoints.models import BASE_MODEL
from lora_tool.checkpoints.named_adapters import NAMED_ADAPTERS
from lora_tool.checkpoints.state_file import STATE_FILE
from lora_tool.checkpoints.verl import VERL
from lora_tool.core.errors import CheckpointError

RUN: Kind = Kind(
    name="run folder",
    sign="checkpoint-N",
    command="ls",
    recognise=lambda folder: Claim.INSIDE if saves_in(folder) else None,
    open=lambda folder: RunDir(kind=RUN, folder=folder, problems=folder.problems),
)
"""The output folder of a training run, full of saves: `checkpoint-N`, or as its framework calls them."""
_CERTAIN: tuple[Kind, ...] = (ADAPTER, BASE_MODEL, ZERO, FSDP_RANKS, FSDP_FULL, CUT_SAFETENSORS)
"""Those whose files no other program writes."""
_COMMON: tuple[Kind, ...] = (DCP, VERL, RUN, NAMED_ADAPTERS, STATE_FILE, GGUF_ADAPTER)
"""Those whose files or folders others write, too."""
_ORDINARY = re.compile(
    r"(?:config\.json|adapter_(?:config|model)|model\b|pytorch_model\b|trainer_state|training_args|optimizer\.|scheduler\."
    r"|scaler\.|rng_state|\.git)"
)
"""Beginnings of names that transformers, PEFT and the HF Trainer give to files, besides those that are copied."""


def kinds() -> Iterator[Kind]:
    """Yield all kinds in the order in which they are asked. Those of other packages are read once their turn comes."""
    yield from _CERTAIN
    yield from (added.kind for added in added_kinds())
    yield from _COMMON


def recognised(folder: Folder, kinds: Iterable[Kind]) -> tuple[Kind, Claim] | None:
    """Return the one of `kinds` that has the best claim to the folder, and the claim; None where none has one."""
    best: tuple[Kind, Claim] | None = None
    for kind in kinds:
        claim = kind.recognise(folder)
        if claim is not None and (best is None or claim > best[1]):
            best = kind, claim
        if claim is Claim.WEIGHTS:  # the others would look into each folder of a large checkpoint
            break
    return best


def sharded_kinds() -> Iterator[ShardedKind]:
    """Yield the kinds whose weights lie in pieces."""
    return (kind for kind in kinds() if isinstance(kind, ShardedKind))


def piece_folders(folder: Folder) -> tuple[str, ...]:
    """Return the names of the folders in it that hold pieces of a training checkpoint: DeepSpeed's tags, FSDP's parts."""
    return tuple(filter(holds_pieces, folder.folders))


def holds_rank_files(folder: Folder) -> bool:
    """Return whether pieces of a training checkpoint lie in the folder, themselves or in folders of their own."""
    if _holds_files_of(folder, (*_CERTAIN, *_COMMON)):
        return True
    # plain folders are most, and reading entry points takes as long as judging one
    return not _is_plain(folder) and _holds_files_of(folder, (added.kind for added in added_kinds()))


def _holds_files_of(folder: Folder, among: Iterable[Kind]) -> bool:
    return any(
        matches(name, patterns)
        for kind in among
        if isinstance(kind, ShardedKind)
        for names, patterns in ((folder.folders, kind.folders), (folder.files, kind.weights))
        for name in names
    )


def _is_plain(folder: Folder) -> bool:
    """Return whether the folder holds nothing but files of which each has the name of an adapter's, a model's or a Trainer's."""
    known = {*folder.copied_files, *folder.trained_beside}
    return not folder.folders and all(name in known or _ORDINARY.match(name) for name in folder.files)


def holds_pieces(name: str) -> bool:
    """Return whether a folder of this name is a part of the checkpoint that it lies in."""
    return any(matches(name, kind.folders) for kind in sharded_kinds())


def is_step(name: str) -> bool:
    """Return whether a folder of this name is a save of a run: `checkpoint-N`, or as its framework calls them."""
    return is_numbered(name) or any(kind.steps and kind.steps.match(name) for kind in sharded_kinds())


def is_save(path: Path) -> bool:
    """Return whether the folder `path` is a save of a run: by its name, or by a common name and the weights in it."""
    return is_step(path.name) or _kind_of_save(path) is not None


def saves_in(folder: Folder) -> tuple[str, ...]:
    """Return the names of the folders in it that are saves of a run, by step; pieces of itself, as tags are, left out."""

    def is_own(name: str) -> bool:
        if is_numbered(name):
            return True
        kind = _kind_of_save(folder.root / name)
        return kind is not None and not (isinstance(kind, ShardedKind) and holds_pieces(name))

    return tuple(sorted(filter(is_own, folder.folders), key=step_of))


def _kind_of_save(path: Path) -> Kind | None:
    """Return what lies in a folder that is called like a save; None in any other, and where nothing is recognised."""
    if not is_called_save(path.name):
        return None
    try:
        # a link to the run itself would never end
        found = recognised(read_folder(path), (kind for kind in kinds() if kind is not RUN))
    except CheckpointError:  # it cannot be listed
        return None
    return found and found[0]
