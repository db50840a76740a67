"""Open a folder: every registered kind of checkpoint says whether the folder is one of its own.

`open_checkpoint` reads names, JSON files and tensor headers, never a weight. Faults go into the
checkpoint's `problems`, so that a report shows all of them; `require_whole` raises the first.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from pathlib import Path

from lora_tool.checkpoints import other_formats
from lora_tool.checkpoints.folders import Folder, is_called_save, read_folder
from lora_tool.checkpoints.gguf_adapter import GGUF_ADAPTER
from lora_tool.checkpoints.kinds import AdapterDir, Checkpoint, ModelDir, ShardedDir, step_of, unexpected
from lora_tool.checkpoints.models import unmerged_model
from lora_tool.checkpoints.nearby import consolidate_command
from lora_tool.checkpoints.registry import holds_pieces, kinds, recognised, sharded_kinds
from lora_tool.core.display import some
from lora_tool.core.errors import BadConfig, CheckpointError, CorruptFile, Defect, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.formats import adapter_config, model_config
from lora_tool.formats.files import inside

_ENOUGH = 5
"""Names of folders by which a reader recognises the place."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint in the local folder `path`, read from file names, JSON and tensor headers.

    Faults inside it are in its `problems`. Raises `NotACheckpoint` where the folder holds no checkpoint, and
    `UnsupportedCheckpoint` for files of other programs.
    """
    folder = read_folder(Path(path))
    found = recognised(folder, kinds())
    if found is not None:
        return found[0].open(folder)
    below = _sharded_below(folder)
    if len(below) == 1:  # OpenRLHF's `_actor`
        return below[0]
    if not below:
        other_formats.refuse_files(folder)
        for name in folder.folders if is_called_save(folder.name) else ():
            other_formats.refuse_files(Folder(root=folder.root / name, files=folder.names_in(name), folders=()))
    raise _no_checkpoint_itself(folder, {sharded.root.name for sharded in below})


def open_sharded(path: str | os.PathLike[str]) -> ShardedDir:
    """Return the rank files in the folder `path` as a checkpoint, also where the folder has an adapter or model, too.

    The HF Trainer puts both into one folder; OpenRLHF puts the rank files one folder down (`_actor`). Raises
    `NotACheckpoint` where there are none, or several checkpoints.
    """
    folder = read_folder(Path(path))
    here = _sharded_in(folder)
    if here is not None:
        return here
    below = _sharded_below(folder)
    if len(below) == 1:
        return below[0]
    if below:
        last = max(below, key=lambda sharded: step_of(sharded.root.name)).root
        message = f"{folder.root} holds {len(below)} checkpoints: {some([sharded.root.name for sharded in below])}"
        raise NotACheckpoint(message, hint=f"lora-tool consolidate {shlex.quote(str(last))}")
    return _unmerged_in(folder)


def _unmerged_in(folder: Folder) -> ShardedDir:
    """Return the state of a PEFT model that was saved as a model. Raises `NotACheckpoint` where there is none."""
    try:
        found = open_checkpoint(folder.root)
    except CheckpointError:
        raise _not_sharded(folder, None) from None
    unmerged = unmerged_model(found) if isinstance(found, ModelDir) else found
    if not isinstance(unmerged, ShardedDir):
        raise _not_sharded(folder, found)
    return unmerged


def _sharded_in(folder: Folder) -> ShardedDir | None:
    found = recognised(folder, sharded_kinds())
    opened = found and found[0].open(folder)
    return opened if isinstance(opened, ShardedDir) else None


def _sharded_below(folder: Folder) -> list[ShardedDir]:
    found = []
    for name in folder.folders:
        if not inside(folder.root, folder.root / name):
            continue
        try:
            found.append(_sharded_in(read_folder(folder.root / name)))
        except NotACheckpoint:  # it cannot be listed
            if holds_pieces(name):
                raise
    return [sharded for sharded in found if sharded is not None]


def _not_sharded(folder: Folder, found: Checkpoint | None) -> NotACheckpoint:
    """Return the error for a folder without rank files; `found` is the checkpoint that it holds instead, if any."""
    if found is None:
        *signs, last = (kind.sign for kind in sharded_kinds())
        message = f"{folder.root} holds no rank files: neither {', '.join(signs)} nor {last}"
        return NotACheckpoint(message, hint=consolidate_command(folder.root) or _list_below(folder))
    lacking = isinstance(found, AdapterDir) or found.is_broken
    return unexpected(found, "rank files", hint=consolidate_command(folder.root) if lacking else None)


def _no_checkpoint_itself(folder: Folder, sharded: Collection[str]) -> NotACheckpoint:
    """Return the error that names the folder's contents; `sharded` are those of its folders that hold pieces."""
    if not folder.files and not folder.folders:
        return NotACheckpoint(f"{folder.root} is an empty folder")
    configs = {adapter_config.FILE_NAME, model_config.FILE_NAME}
    held = [
        name
        for name in folder.folders
        if name in sharded or any(each in configs or is_called_save(each) for each in folder.names_in(name))
    ]
    ls = f"lora-tool ls {shlex.quote(str(folder.root))}"
    if held:
        hint = f"name one of them: {shlex.quote(str(folder.root / held[0]))}; to list them: {ls}"
        message = f"{folder.root} is not a checkpoint itself, but holds: {some(held, _ENOUGH)}"
        return NotACheckpoint(message, hint=hint)
    *signs, last = (kind.sign for kind in kinds())
    message = f"{folder.root} holds no {', '.join(signs)} or {last}"
    return NotACheckpoint(message, hint=_list_below(folder))


def _list_below(folder: Folder) -> str | None:
    listing = f"to list what lies further down: lora-tool ls {shlex.quote(str(folder.root))}"
    return listing if folder.folders else None


def require_whole(checkpoint: Checkpoint) -> None:
    """Return if no file has a fatal problem. Raises `CorruptFile` or `BadConfig` for the first that has one."""
    for problem in checkpoint.problems:
        if problem.fatal:
            error = BadConfig if problem.defect is Defect.BAD_FIELD else CorruptFile
            raise error(problem, hint=f"lora-tool validate {shlex.quote(str(checkpoint.root))}")


def open_model(path: str | os.PathLike[str]) -> ModelDir:
    """Return the model folder `path`. Raises `NotACheckpoint` where it is something else."""
    return as_model(open_checkpoint(path))


def as_model(checkpoint: Checkpoint, *, hint: str | None = None) -> ModelDir:
    """Return the checkpoint, which is a model. Raises `NotACheckpoint` where it is something else, with the `hint`."""
    if isinstance(checkpoint, AdapterDir) and model_config.FILE_NAME in checkpoint.folder.files:
        raise NotACheckpoint(
            f"{checkpoint.root} holds an adapter beside a model's {model_config.FILE_NAME}: expected a model alone",
            hint=f"move {adapter_config.FILE_NAME} and the adapter's weights into a folder of their own",
        )
    if not isinstance(checkpoint, ModelDir):
        raise unexpected(checkpoint, "a model", hint=hint)
    return checkpoint


def open_adapter(path: str | os.PathLike[str], *, hint: str | None = None) -> AdapterDir:
    """Return the adapter folder `path`. Raises `NotACheckpoint` where it is something else, with the `hint` if given."""
    return as_adapter(open_checkpoint(path), hint=hint)


def as_adapter(checkpoint: Checkpoint, *, hint: str | None = None) -> AdapterDir:
    """Return the checkpoint, which is an adapter. Raises `NotACheckpoint` where it is something else."""
    if not isinstance(checkpoint, AdapterDir):
        raise unexpected(checkpoint, "an adapter", hint=hint)
    if checkpoint.kind is GGUF_ADAPTER:  # the rows of q and k may be in another order, which the file does not tell
        raise UnsupportedCheckpoint(
            f"{checkpoint.root} is an adapter in llama.cpp's format, which is only for llama.cpp",
            hint="give the PEFT adapter that it was written from",
        )
    return checkpoint
