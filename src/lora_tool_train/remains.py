"""The saves that a training left: the last whole checkpoint, and results."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoints import open_checkpoint
from lora_tool.checkpoints.folders import read_folder
from lora_tool.core.errors import CheckpointError
from lora_tool.core.report import Finding, Severity
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.verification.validating import unresumable_reason, validate
from lora_tool_train.errors import TrainingFailed
from lora_tool_train.results import weight_files
from lora_tool_train.traps import trap


class ResumeChoice(Struct, frozen=True, kw_only=True):
    """The checkpoint to resume from, None for a start from step 0; `skipped` are findings about those passed over."""

    path: Path | None = None
    skipped: tuple[Finding, ...] = ()


class Saved(Struct, frozen=True, kw_only=True):
    """A folder with weights that a training left, and what is wrong with them."""

    path: Path
    errors: tuple[Finding, ...]


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
        hint = "--resume auto takes the last complete checkpoint; lora-tool ci makes a base of anything else"
        raise TrainingFailed(f"{path}: cannot be resumed from: {why}", hint=hint)
    return ResumeChoice(path=path)


def unusable(path: Path) -> str | None:
    """Return why transformers' Trainer cannot go on from the checkpoint `path`; None if it can. Every value is read."""
    if not (path / TRAINER_STATE).is_file():
        return f"has no {TRAINER_STATE}: it was not saved completely, or not by transformers' Trainer"
    return unresumable_reason(path)


def saved_in(outputs: Iterable[Path], *, since: float = 0.0) -> Iterator[Saved]:
    """Yield each adapter or model that lies in the folders or one level below, written at `since` or later."""
    for output in outputs:
        for folder in (output, *sorted(filter(Path.is_dir, output.glob("*")))):
            if any((folder / name).stat().st_mtime >= since for name in weight_files(folder)):
                with contextlib.suppress(CheckpointError):
                    yield Saved(path=folder, errors=validate(open_checkpoint(folder)).at_least(Severity.ERROR))
