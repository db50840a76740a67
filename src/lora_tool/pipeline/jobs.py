"""The jobs of a sweep: one for each adapter and checkpoint under a folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tool.checkpoint import TRAINED_MODEL, AdapterDir, ModelDir, open_checkpoint, open_sharded
from lora_tool.errors import LoraToolError, NotACheckpoint, WrongValue
from lora_tool.formats import adapter_config
from lora_tool.inventory import checkpoints_under
from lora_tool.pipeline.model import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The jobs in the order of the folders' names, and the models that are not among them."""

    jobs: tuple[Job, ...]
    left_out: tuple[Path, ...]
    """Models that no training of the sweep left: bases, and what lora-tool wrote."""


def sweep_of(job: Job) -> Sweep:
    """Return a job as this one for every adapter and checkpoint under its folder.

    The output of each is a folder in that of `job`, called like its path below `job.checkpoint`, with ``-`` for ``/``.
    What lies in the outputs is left out. A folder that cannot be opened has a job, which says so. Raises
    `NotACheckpoint` where none is found, `WrongValue` where two would be written to one folder.
    """
    left_out: list[Path] = []
    trained = [folder for folder in _folders(job) if _is_trained(folder, left_out)]
    found = [folder for folder in trained if not (folder.parent in trained and _is_latest_of(folder.parent, folder))]
    if not found:
        raise NotACheckpoint(
            f"{job.checkpoint} holds no adapter and no training checkpoint",
            hint=f"lora-tool ls {shlex.quote(str(job.checkpoint))} lists what there is",
        )
    out = job.output
    jobs = tuple(
        replace(job, checkpoint=folder, output=out / _name(folder, job.checkpoint), sweep=out) for folder in found
    )
    _require_apart(jobs)
    return Sweep(jobs=jobs, left_out=tuple(left_out))


def _folders(job: Job) -> Iterator[Path]:
    """Yield the folders that may be checkpoints, each once, but not those in the output."""
    listed = [
        folder
        for folder in checkpoints_under(job.checkpoint, signs=(adapter_config.FILE_NAME,), links=True)
        if not _lies_in(folder, job.output)
    ]
    seen = {os.path.realpath(folder) for folder in listed if not folder.is_symlink()}
    for folder in listed:
        if not folder.is_symlink():
            yield folder
        elif os.path.realpath(folder) not in seen:  # of a link to a checkpoint of the sweep, that one is taken
            seen.add(os.path.realpath(folder))
            yield folder


def _lies_in(folder: Path, out: Path) -> bool:
    real = Path(os.path.realpath(folder))
    return Path(os.path.realpath(out)) in (real, *real.parents)


def _is_trained(folder: Path, left_out: list[Path]) -> bool:
    """Return whether the folder is one that a training left; a model that is not is noted in `left_out`."""
    try:
        opened = open_checkpoint(folder)
    except (LoraToolError, OSError):
        return True
    if isinstance(opened, ModelDir) and opened.kind is not TRAINED_MODEL:
        left_out.append(folder)
        return False
    # beside the checkpoints of a run that has not ended there may be a config, and no weights yet
    return not (isinstance(opened, AdapterDir) and not opened.tensors and opened.folder.checkpoints)


def _is_latest_of(checkpoint: Path, folder: Path) -> bool:
    """Return whether the folder holds the rank files of a checkpoint around it, which is taken with them."""
    try:
        return open_sharded(checkpoint).latest == folder.name
    except (LoraToolError, OSError):
        return False


def _name(folder: Path, root: Path) -> str:
    parts = folder.relative_to(root).parts
    return "-".join(parts) or Path(os.path.realpath(root)).name or "checkpoint"


def _require_apart(jobs: tuple[Job, ...]) -> None:
    owners: dict[Path, Job] = {}
    for job in jobs:
        for path in (job.output, job.consolidated):
            other = owners.setdefault(path, job)
            if other is not job:
                raise WrongValue(
                    f"{other.checkpoint} and {job.checkpoint} would both be written to {path}",
                    hint="run `lora-tool ci` on one of them by itself, and keep it in another folder",
                )
