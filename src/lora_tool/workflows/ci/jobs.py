"""The jobs of a sweep: one for each adapter and checkpoint under a folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import (
    TRAINED_MODEL,
    AdapterDir,
    Checkpoint,
    ModelDir,
    ShardedDir,
    open_checkpoint,
    open_sharded,
)
from lora_tool.core.errors import CheckpointError, LoraToolError, NotACheckpoint, WrongValue
from lora_tool.formats import adapter_config, manifest
from lora_tool.formats.manifest import read_manifest
from lora_tool.workflows.ci.model import Job
from lora_tool.workflows.inventory import checkpoints_under


class Sweep(Struct, frozen=True, kw_only=True):
    """The jobs in the order of the folders' names, and the folders that are not among them."""

    jobs: tuple[Job, ...]
    left_out: Mapping[Path, str]
    """Folders that are no job, and what each is: a base or a model of ours, or an adapter that `consolidate` wrote."""


def sweep_of(job: Job) -> Sweep:
    """Return a job as this one for every adapter and checkpoint under its folder.

    The output of each is a folder in that of `job`, called like its path below `job.checkpoint`, with ``-`` for ``/``.
    What lies in the outputs is left out. A folder that cannot be opened has a job, which says so. Raises
    `NotACheckpoint` where none is found, `WrongValue` where two would be written to one folder.
    """
    looked = {folder: _look(folder) for folder in _folders(job)}
    left_out = dict(_left_out(looked))
    trained = [folder for folder, one in looked.items() if folder not in left_out and not one.bare]
    found = [folder for folder in trained if not (folder.parent in trained and _is_latest_of(folder.parent, folder))]
    if not found:
        raise NotACheckpoint(
            f"{job.checkpoint} holds no adapter and no training checkpoint",
            hint=f"lora-tool ls {shlex.quote(str(job.checkpoint))} lists what there is",
        )
    out = job.output
    jobs = {
        folder: replace(job, checkpoint=folder, output=out / _name(folder, job.checkpoint), sweep=out)
        for folder in found
    }
    _require_apart((one, looked[folder].may_consolidate) for folder, one in jobs.items())
    return Sweep(jobs=tuple(jobs.values()), left_out=left_out)


def _folders(job: Job) -> Iterator[Path]:
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


class _Looked(Struct, frozen=True, kw_only=True):
    """What a sweep asks of a folder; of one that cannot be opened nothing, since its job will say so."""

    needs_no_merge: bool = False
    consolidated_from: Path | None = None
    """The checkpoint beside an adapter that `consolidate` wrote, by its manifest."""
    may_consolidate: bool = False
    bare: bool = False
    """Only a config, and no weights yet, beside the checkpoints of a run that has not ended."""


def _look(folder: Path) -> _Looked:
    try:
        opened = open_checkpoint(folder)
    except (LoraToolError, OSError):
        return _Looked()
    return _Looked(
        needs_no_merge=isinstance(opened, ModelDir) and opened.kind is not TRAINED_MODEL,
        consolidated_from=_consolidated_from(folder) if isinstance(opened, AdapterDir) else None,
        may_consolidate=isinstance(opened, ShardedDir) or has_rank_files(opened),
        bare=isinstance(opened, AdapterDir) and not opened.tensors and bool(opened.folder.checkpoints),
    )


def has_rank_files(opened: Checkpoint) -> bool:
    """Return whether weights that lie in the folder also lie there in pieces, as training saved them."""
    if not isinstance(opened, AdapterDir | ModelDir):
        return False
    try:
        return open_sharded(opened.root).root == opened.root
    except CheckpointError:
        return False


def _consolidated_from(adapter: Path) -> Path | None:
    """Return the checkpoint beside an adapter that `consolidate` wrote, by its manifest; None of any other adapter."""
    try:
        written = read_manifest(adapter / manifest.FILE_NAME)
    except (LoraToolError, OSError):
        return None
    source = written.input("checkpoint").get("path")
    if written.raw.get("operation") != "consolidate" or not isinstance(source, str):
        return None
    return adapter.parent / Path(source).name  # by its name: both may have been moved together


def _left_out(looked: Mapping[Path, _Looked]) -> Iterator[tuple[Path, str]]:
    """Yield the folders that no training of the sweep left, and what each is."""
    for folder, one in looked.items():
        source = one.consolidated_from
        if one.needs_no_merge:
            yield folder, "a model that needs no merge"
        elif source is not None and source in looked and looked[source].may_consolidate:
            yield folder, f"the adapter that lora-tool consolidated from {source.name}, which is checked itself"


def _is_latest_of(checkpoint: Path, folder: Path) -> bool:
    """Return whether the folder holds the rank files of a checkpoint around it, which is taken with them."""
    try:
        return open_sharded(checkpoint).latest == folder.name
    except (LoraToolError, OSError):
        return False


def _name(folder: Path, root: Path) -> str:
    parts = folder.relative_to(root).parts
    return "-".join(parts) or Path(os.path.realpath(root)).name or "checkpoint"


def _require_apart(jobs: Iterable[tuple[Job, bool]]) -> None:
    """Raise `WrongValue` where two jobs, each with whether it may consolidate first, would write to one folder."""
    owners: dict[Path, Job] = {}
    for job, consolidates in jobs:
        for path in (job.output, job.consolidated) if consolidates else (job.output,):
            other = owners.setdefault(path, job)
            if other is not job:
                raise WrongValue(
                    f"{other.checkpoint} and {job.checkpoint} would both be written to {path}",
                    hint="run `lora-tool ci` on one of them by itself, and keep it in another folder",
                )
