"""What a training left on disk: the last whole checkpoint, results, and rank files of which an adapter can be made."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoint import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    RunDir,
    ShardedDir,
    open_checkpoint,
    open_sharded,
)
from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import CheckpointError, TrainingFailed, UnsupportedCheckpoint
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.report import Finding, Severity
from lora_tool.train.saving import weight_files
from lora_tool.train.traps import trap
from lora_tool.validation.validating import unresumable_reason, validate

_EMPTY = "LT206"
"""Tensors without values, saved under DeepSpeed ZeRO-3."""


class ResumeChoice(Struct, frozen=True, kw_only=True):
    """The checkpoint to resume from, None for a start from step 0; `skipped` are findings about those passed over."""

    path: Path | None = None
    skipped: tuple[Finding, ...] = ()


class Saved(Struct, frozen=True, kw_only=True):
    """A folder with weights that a training left, and what is wrong with them."""

    path: Path
    errors: tuple[Finding, ...]

    @property
    def empty(self) -> bool:
        return is_empty(self.errors)


def is_empty(findings: Iterable[Finding]) -> bool:
    """Return whether an adapter without values is among what was found."""
    return any(found.code == _EMPTY for found in findings)


def last_valid(output: Path) -> ResumeChoice:
    """Return the newest checkpoint in `output` that a run can go on from, and why newer ones were passed over.

    It is the last that is whole, not the one with the largest number.
    """
    names = read_folder(output).checkpoints if output.is_dir() else ()
    skipped: list[Finding] = []
    for path in (output / name for name in reversed(names)):
        why = unusable(path)
        if why is None:
            return ResumeChoice(path=path, skipped=tuple(skipped))
        skipped.append(
            trap("unusable-checkpoint", f"lora-tool validate {shlex.quote(str(path))} --deep", where=str(path), why=why)
        )
    return ResumeChoice(skipped=tuple(skipped))


def named(path: Path) -> ResumeChoice:
    """Return the checkpoint that was named. Raises `TrainingFailed` if no run can go on from it."""
    why = unusable(path) if path.is_dir() else "no such folder"
    if why is not None:
        raise TrainingFailed(f"{path}: cannot be resumed from: {why}", hint=_instead_of(path))
    return ResumeChoice(path=path)


def unusable(path: Path) -> str | None:
    """Return why transformers' Trainer cannot go on from the checkpoint `path`; None if it can. Every value is read."""
    opened = None if (path / TRAINER_STATE).is_file() else _other_kind(path)
    if opened is None:
        return unresumable_reason(path)
    kind = opened.kind.with_article
    if isinstance(opened, RunDir):
        return f"is {kind}, not one of its checkpoints"
    return f"is {kind} without {TRAINER_STATE}: only the program that saved it can resume from it"


def _other_kind(path: Path) -> Checkpoint | None:
    """Return what the folder holds if no Trainer has saved it, by its name; None where that cannot be opened."""
    if not read_folder(path).is_numbered:
        with contextlib.suppress(CheckpointError, UnsupportedCheckpoint):
            return open_checkpoint(path)
    return None


def _instead_of(path: Path) -> str:
    """Return what to do instead of resuming from `path`."""
    opened = _other_kind(path) if path.is_dir() else None
    folder = shlex.quote(str(path))
    match opened:
        case RunDir():
            last = shlex.quote(str(path / opened.folder.checkpoints[-1]))
            return f"give one of its checkpoints: --resume {last}"
        case ModelDir():
            return f"start a new run from it: model_name_or_path: {folder}"
        case AdapterDir() | ShardedDir():
            command = "merge" if isinstance(opened, AdapterDir) else "ci"
            return f"start a new run from the merged model: lora-tool {command} {folder} -o OUT, then model_name_or_path: OUT"
        case _:
            return "--resume auto takes the last complete checkpoint"


def saved_in(outputs: Iterable[Path], *, since: float = 0.0) -> Iterator[Saved]:
    """Yield each adapter or model that lies in the folders or one level below, written at `since` or later."""
    for output in outputs:
        for folder in (output, *sorted(filter(Path.is_dir, output.glob("*")))):
            if any((folder / name).stat().st_mtime >= since for name in weight_files(folder)):
                with contextlib.suppress(CheckpointError):
                    yield Saved(path=folder, errors=validate(open_checkpoint(folder)).at_least(Severity.ERROR))


def newest_rank_files(output: Path) -> Path | None:
    """Return the newest checkpoint in or below `output` that holds the weights in pieces."""
    for folder in (*(output / name for name in reversed(read_folder(output).checkpoints)), output):
        with contextlib.suppress(CheckpointError):
            open_sharded(folder)
            return folder
    return None


def reassemble(checkpoint: Path, out: Path) -> bool:
    """Reassemble an adapter from rank files into `out`, as `lora-tool consolidate` does; return whether it is good."""
    arguments = ["consolidate", str(checkpoint), "-o", str(out), "--what", "adapter", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "lora_tool", *arguments], check=False, stdout=sys.stderr)  # noqa: S603
    return done.returncode == 0 and not validate(open_checkpoint(out), deep=True).at_least(Severity.ERROR)
