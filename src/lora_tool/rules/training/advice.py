"""What a finding about the files of a training checkpoint advises."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from lora_tool.checkpoints.folders import is_numbered, listed
from lora_tool.checkpoints.kinds import step_of
from lora_tool.checkpoints.registry import is_save, is_step
from lora_tool.core.display import from_here

COPY = "copy each rank's files from the machine that wrote them: every node saves those of its own ranks"
_DEEPEST = 4
"""Folders from a rank file up to the save that it belongs to: Megatron's `iter_N/actor/model/dist_ckpt`."""
_NUMBER = re.compile(r"\d+")


@lru_cache(maxsize=64)  # asked once for each of a million faults of a file
def another_save(path: Path, *, earlier: bool = False) -> str:
    """Return what to do instead of using the save of a run that the file or folder `path` belongs to.

    It names the save that lies nearest before it, else the next one unless it has to be `earlier`; only what kind of
    save to look for, where none lies there.
    """
    for folder in itertools.islice((path.absolute(), *path.absolute().parents), _DEEPEST + 1):
        if not is_save(folder):
            continue
        step = step_of(folder.name)[0]
        saves = sorted((step_of(name)[0], name) for name in _alike(folder))
        before = [name for number, name in saves if number < step]
        after = [name for number, name in saves if number > step]
        name = before[-1] if before else None if earlier or not after else after[0]
        if name is not None:
            # a tag belongs to the checkpoint around it, which has the adapter's config
            is_tag = is_step(name) and not is_numbered(name)
            where = (from_here(folder.parent), "--tag", name) if is_tag else (from_here(folder.parent / name),)
            return f"use {name}: {shlex.join(['lora-tool', 'consolidate', *map(str, where)])}"
    return f"use {'an earlier' if earlier else 'another'} save of the run"


def _alike(save: Path) -> Iterator[str]:
    """Yield the names of the folders beside a save that are called as it is, but for the number."""
    stem = _NUMBER.sub("", save.name)
    for name in listed(save.parent):
        if name != save.name and _NUMBER.sub("", name) == stem and is_save(save.parent / name):
            yield name
