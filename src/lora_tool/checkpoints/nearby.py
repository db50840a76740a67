"""Finds the training checkpoint with the values that an adapter folder lacks: in it, next to it or above it."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from lora_tool.checkpoints.kinds import step_of
from lora_tool.checkpoints.registry import holds_pieces, is_step, sharded_kinds
from lora_tool.formats.adapter_config import FILE_NAME as ADAPTER_CONFIG
from lora_tool.formats.files import is_file

_MOST_FOLDERS = 10_000
"""How many folders are searched at most: the folder above may be a home directory."""
_OF_A_RUN = re.compile(r"_|.*(ckpt|checkpoint)", re.IGNORECASE)
"""Names of folders in a run that hold several of its saves."""


def training_state_near(root: Path) -> Path | None:
    """Return the folder of the newest rank files, such as a DeepSpeed tag, in `root`, next to it or above it.

    A folder there may hold it, as OpenRLHF's `_actor` does and the HF Trainer's `checkpoint-N`.
    """
    for near in (root, root.resolve().parent):
        found = [
            state
            for state in itertools.islice(_states_in(near), 1000)
            if near == root or not _is_another_run(state, near, root)
        ]
        if found:
            return max(found, key=_step_of)
    return None


def _is_another_run(state: Path, near: Path, root: Path) -> bool:
    """Return whether the rank files lie in a folder next to `root` that is another run, by its config or its name.

    This run's are folders with a framework's name for a save, OpenRLHF's `_actor`, and folders called checkpoints.
    """
    sibling = near / state.relative_to(near).parts[0] if state != near else near
    if sibling in (near, root.resolve()) or is_step(sibling.name) or holds_pieces(sibling.name):
        return False
    if is_file(sibling / ADAPTER_CONFIG):
        return True
    return state != sibling and not _OF_A_RUN.match(sibling.name)


def consolidate_command(root: Path) -> str | None:
    """Return the command that consolidates the state that `training_state_near` finds, None where it finds none."""
    state = training_state_near(root)
    if state is None:
        return None
    checkpoint = state.parent if holds_pieces(state.name) else state
    config_is_near = any(is_file(place / ADAPTER_CONFIG) for place in (checkpoint, state, checkpoint.parent))
    has_own = not config_is_near and is_file(root / ADAPTER_CONFIG)
    own = f" --adapter-config {shlex.quote(str(root))}" if has_own else ""
    return f"lora-tool consolidate {shlex.quote(str(checkpoint))}{own}"


def way_to_head(root: Path, module: str) -> str:
    """Return what to do for a head that neither the adapter in `root` nor its base has."""
    command = consolidate_command(root)
    if command:
        return f"look for it in the training checkpoint: {command}"
    return (
        "look for it in the training checkpoint (global_step…), or train again with "
        f'task_type="SEQ_CLS" or modules_to_save=["{module}"]'
    )


def _states_in(near: Path) -> Iterator[Path]:
    folders = itertools.islice(_folders(near, depth=2), _MOST_FOLDERS)
    landmarks = [name for kind in sharded_kinds() for name in kind.landmarks]
    for folder in itertools.chain((near,), folders):
        if not folder.name.startswith("optimizer") and any(is_file(folder / name) for name in landmarks):
            yield folder


def _folders(root: Path, *, depth: int) -> Iterator[Path]:
    """Yield the folders in `root`, the nearest first, links left out."""
    try:
        inner = [root / entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    yield from inner
    if depth > 1:
        for folder in inner:
            yield from _folders(folder, depth=depth - 1)


def _step_of(state: Path) -> int:
    """Return the number that its name ends with, or the name of the folder above, as in `checkpoint-5/…`."""
    names = (path.name for path in (state.parent, state) if not path.name.startswith("pytorch_"))
    return max((step_of(name)[0] for name in names), default=0)
