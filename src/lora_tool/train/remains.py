"""What a training left on disk: the last whole checkpoint, results, and rank files of which an adapter can be made."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoint import open_checkpoint, open_sharded
from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import CheckpointError, FindingsFound, TrainingFailed, UnsupportedCheckpoint
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.report import Finding, Severity
from lora_tool.train.saving import weight_files
from lora_tool.train.traps import trap
from lora_tool.validation.validating import validate

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_STATES = (*_OPTIMIZERS, "scheduler.pt", "scaler.pt")
_EMPTY = "LT206"
"""Tensors without values, saved under DeepSpeed ZeRO-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeChoice:
    """The checkpoint to resume from, None for a start from step 0; `skipped` are findings about those passed over."""

    path: Path | None = None
    skipped: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
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
        skipped.append(trap("unusable-checkpoint", f"lora-tool validate {path} --deep", where=str(path), why=why))
    return ResumeChoice(skipped=tuple(skipped))


def named(path: Path) -> ResumeChoice:
    """Return the checkpoint that was named. Raises `TrainingFailed` if no run can go on from it."""
    why = unusable(path) if path.is_dir() else "no such folder"
    if why is not None:
        hint = "--resume auto takes the last complete checkpoint"
        raise TrainingFailed(f"{path}: cannot be resumed from: {why}", hint=hint)
    return ResumeChoice(path=path)


def unusable(path: Path) -> str | None:
    """Return why no run can go on from the checkpoint `path`; None if one can. Every value of it is read."""
    names = {item.name for item in path.iterdir()}
    if TRAINER_STATE not in names:
        return _without_state(path)
    try:
        validate(open_checkpoint(path), deep=True).raise_for_errors()
    except (CheckpointError, FindingsFound) as error:
        return str(error)
    states = (name for name in sorted(names) if name in _STATES or name.startswith("rng_state"))
    cut = next((name for name in states if not zipfile.is_zipfile(path / name)), None)
    if cut is not None:
        return f"{cut} is not a complete torch.save file"
    if names & set(_OPTIMIZERS) or any(name.startswith(("optimizer_", "pytorch_model_fsdp")) for name in names):
        return None
    with contextlib.suppress(CheckpointError):
        if open_sharded(path).kind.optimizer:
            return None
    return "has no optimizer state (save_only_model), so resuming would start with a new optimizer"


def _without_state(path: Path) -> str:
    """Return what a folder without a Trainer's state is instead of a checkpoint to resume from."""
    if not read_folder(path).is_numbered:  # not by a Trainer's name
        with contextlib.suppress(CheckpointError, UnsupportedCheckpoint):
            kind = open_checkpoint(path).kind
            return f"is {kind.with_article} without {TRAINER_STATE}: only the program that saved it can resume from it"
    return f"has no {TRAINER_STATE}, so it was not saved completely"


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
