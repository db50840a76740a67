"""The jobs of a sweep: one for each adapter and checkpoint under a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from lora_tool.checkpoints import (
    TRAINED_MODEL,
    AdapterDir,
    Checkpoint,
    ModelDir,
    ShardedDir,
    adapters_below,
    is_frozen,
    open_checkpoint,
    open_sharded,
    saves_in,
)
from lora_tool.checkpoints.registry import is_save
from lora_tool.checkpoints.sources import Wanted, located
from lora_tool.core.errors import CheckpointError, CorruptFile, LoraToolError, NotACheckpoint, WrongValue
from lora_tool.core.version import __version__
from lora_tool.execution.folder import replace_file
from lora_tool.formats import adapter_config, manifest
from lora_tool.formats.files import is_file, read_json
from lora_tool.formats.manifest import read_manifest
from lora_tool.workflows.ci.model import Job, Ranked
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
    root = located(job.checkpoint, Wanted.ADAPTER).path
    looked = {folder: _look(folder) for folder in _folders(root, job.output)}
    left_out = dict(_left_out(looked))
    trained = [folder for folder, one in looked.items() if folder not in left_out and not one.bare]
    found = [folder for folder in trained if not (folder.parent in trained and _is_latest_of(folder.parent, folder))]
    if not found:
        raise NotACheckpoint(
            f"{job.checkpoint} holds no adapter and no training checkpoint",
            hint=f"lora-tool ls {shlex.quote(str(job.checkpoint))} lists what there is",
        )
    out = job.output
    jobs = {folder: replace(job, checkpoint=folder, output=out / _name(folder, root), sweep=out) for folder in found}
    _require_apart((one, looked[folder].may_consolidate) for folder, one in jobs.items())
    return Sweep(jobs=tuple(jobs.values()), left_out=left_out)


def _folders(root: Path, out: Path) -> Iterator[Path]:
    listed = [
        folder
        for found in checkpoints_under(root, signs=(adapter_config.FILE_NAME,), links=True)
        for folder in (adapters_below(found) if is_save(found) else ()) or (found,)
        if not _lies_in(folder, out)
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
    frozen: bool = False
    """An adapter that is the same in every save of its run: the reference of another."""
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
        frozen=isinstance(opened, AdapterDir) and is_frozen(opened),
        consolidated_from=_consolidated_from(folder) if isinstance(opened, AdapterDir) else None,
        may_consolidate=isinstance(opened, ShardedDir) or has_rank_files(opened),
        bare=isinstance(opened, AdapterDir) and not opened.tensors and bool(saves_in(opened.folder)),
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
        elif one.frozen:
            yield folder, "an adapter that its run did not train"
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


# What earlier runs of a pipeline proved, so that nothing is done twice: a small JSON file in the output.
#
# Until the output is there the file lies beside it, so that a run that was cut off is known again.
#
# A stage is known by a key, the hash of everything that decides its result: the version, the options, and name, size and
# times of every input file. Its result is trusted while the files that it left still have the sizes and times they had.
# Of the two times that of the last change of the inode counts, too: `cp -p`, `rsync -t` and `touch -d` set the other.


Stamps = dict[str, list[int]]


FILE_NAME = ".lora-tool-ci.json"
"""In an output; it is no part of what was made."""


def _beside(output: Path) -> Path:
    return output.parent / f".{output.name}{FILE_NAME}"


def key_of(options: object, folders: Iterable[Path], *, own: Iterable[Path] = ()) -> str:
    """Return the key of a stage that reads `folders` and is given `options`, anything that prints alike when equal.

    Files at or under `own` were written by the pipeline, so they are not inputs.
    """
    left_out = tuple(own)
    stamps = {os.path.realpath(folder): stamps_of(folder, left_out) for folder in folders}
    decides = json.dumps([__version__, repr(options), stamps], sort_keys=True)
    return hashlib.sha256(decides.encode()).hexdigest()


def stamps_of(folder: Path, own: Iterable[Path] = ()) -> Stamps:
    """Return file → size and times of change in ns, of all files in and under the folder, those of `own` left out."""
    stamps: Stamps = {}
    left_out = {Path(os.path.realpath(path)) for path in own}
    hidden = tuple(f".{path.name}." for path in left_out)  # what is half written, and the cache
    for where, folders, names in os.walk(folder):
        inside = Path(os.path.realpath(where))
        folders[:] = [name for name in folders if inside / name not in left_out and not _half(inside / name, hidden)]
        for name in names:
            if name == FILE_NAME or inside / name in left_out or _half(inside / name, hidden):
                continue
            path = Path(where, name)
            try:
                found = path.stat()
            except OSError:  # it went away: whoever reads it says so
                continue
            stamps[str(path.relative_to(folder))] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return stamps


def _half(path: Path, hidden: tuple[str, ...]) -> bool:
    return bool(hidden) and path.name.startswith(hidden)


class StageCache:
    """What was proved about one output, in it or beside it. A file that is broken, or of another shape, proves nothing."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._held = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        places = (_beside(self._output), self._output / FILE_NAME)  # the first is there while a run has not ended
        try:
            raw: object = next((read_json(place) for place in places if is_file(place)), {})
        except CorruptFile:
            raw = {}
        table = raw.get("stages") if isinstance(raw, dict) else None
        return (
            {name: entry for name, entry in table.items() if isinstance(entry, dict)} if isinstance(table, dict) else {}
        )

    def __bool__(self) -> bool:
        """Whether an earlier run has begun anything."""
        return bool(self._held)

    def summary(self, stage: str, key: str, folder: Path) -> str | None:
        """Return what the stage said when it was done with this key, if `folder` is as it left it; else None."""
        entry: Mapping[str, Any] = self._held.get(stage, {})
        same = entry.get("key") == key and folder.is_dir() and entry.get("left") == stamps_of(folder)
        summary = entry.get("summary")
        return summary if same and isinstance(summary, str) else None

    def warnings(self, stage: str) -> tuple[str, ...]:
        """Return what the stage warned of when it was done."""
        found = self._held.get(stage, {}).get("warnings")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def ranking(self, stage: str) -> Ranked | None:
        """Return how the pairs were ranked when the stage was done, None where that was not noted."""
        found = self._held.get(stage, {}).get("ranking")
        accuracy, margin = (found.get("accuracy"), found.get("margin")) if isinstance(found, dict) else (None, None)
        if not isinstance(accuracy, float | int) or not isinstance(margin, float | int | None):
            return None
        return Ranked(accuracy=accuracy, margin=margin)

    def begun(self, stage: str, key: str) -> bool:
        """Return whether a run that was cut off had begun the stage with this key."""
        return self._held.get(stage, {}).get("key") == key

    def begin(self, stage: str, key: str) -> None:
        """Note that the stage begins: what then appears under the output's name, at once and whole, is its result."""
        self._held[stage] = {"key": key}
        self._write(_beside(self._output))

    def keep(
        self,
        stage: str,
        key: str,
        folder: Path,
        summary: str,
        warnings: Iterable[str] = (),
        *,
        ranking: Ranked | None = None,
    ) -> None:
        """Note that the stage is done, what it said, and how it left `folder`."""
        entry = {"key": key, "left": stamps_of(folder), "summary": summary, "warnings": list(warnings)}
        self._held[stage] = entry if ranking is None else {**entry, "ranking": asdict(ranking)}
        beside = _beside(self._output)
        if os.path.realpath(folder) == os.path.realpath(self._output):
            self._write(folder / FILE_NAME)
            beside.unlink(missing_ok=True)
        else:
            self._write(beside)

    def close(self) -> None:
        """Leave nothing beside an output that is not there, unless something was proved that the next run can use."""
        if not self._output.exists() and not any("left" in entry for entry in self._held.values()):
            with contextlib.suppress(OSError):  # the folder may be read only
                _beside(self._output).unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"schema_version": 1, "stages": self._held}, indent=1).encode())
