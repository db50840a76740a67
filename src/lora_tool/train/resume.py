"""Which checkpoint a run resumes from: the last one that is whole, not the one with the largest number."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoint import open_checkpoint, open_sharded
from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import CheckpointError, TrainingFailed
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.report import Finding, Severity
from lora_tool.train.codes import warning
from lora_tool.validation.validating import validate

_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_STATES = (*_OPTIMIZERS, "scheduler.pt", "scaler.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeChoice:
    """The checkpoint to resume from, None for a start from step 0; `skipped` are findings about those passed over."""

    path: Path | None = None
    skipped: tuple[Finding, ...] = ()


def last_valid(output: Path) -> ResumeChoice:
    """Return the newest checkpoint in `output` that a run can go on from, and why newer ones were passed over."""
    names = read_folder(output).checkpoints if output.is_dir() else ()
    skipped: list[Finding] = []
    for path in (output / name for name in reversed(names)):
        why = unusable(path)
        if why is None:
            return ResumeChoice(path=path, skipped=tuple(skipped))
        hint = f"lora-tool validate {path} --deep"
        skipped.append(warning("unusable-checkpoint", f"passed over: {why}", hint=hint, where=str(path)))
    return ResumeChoice(skipped=tuple(skipped))


def named(path: Path) -> ResumeChoice:
    """Return the checkpoint that was named. Raises `TrainingFailed` if no run can go on from it."""
    why = unusable(path) if path.is_dir() else "no such folder"
    if why is not None:
        raise TrainingFailed(
            f"{path}: cannot be resumed from: {why}", hint="--resume auto takes the last that is whole"
        )
    return ResumeChoice(path=path)


def unusable(path: Path) -> str | None:
    """Return why no run can go on from the checkpoint `path`; None if one can. Every value of it is read."""
    names = {item.name for item in path.iterdir()}
    if TRAINER_STATE not in names:
        return f"has no {TRAINER_STATE}: it was not written to its end"
    try:
        opened = open_checkpoint(path)
        report = validate(opened, deep=True)
    except CheckpointError as error:
        return str(error)
    errors = report.at_least(Severity.ERROR)
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        file = f"{Path(errors[0].path).name} " if errors[0].path != str(path) else ""
        subject = f"`{errors[0].subject}` " if errors[0].subject else ""
        return f"{errors[0].code} {file}{subject}{errors[0].message}{more}"
    return _unusable_state(path, names)


def _unusable_state(path: Path, names: set[str]) -> str | None:
    for name in sorted(names):
        if (name in _STATES or name.startswith("rng_state")) and not zipfile.is_zipfile(path / name):
            return f"{name} is not a whole file of torch.save"
    if names & set(_OPTIMIZERS) or any(name.startswith(("optimizer_", "pytorch_model_fsdp")) for name in names):
        return None
    try:
        if open_sharded(path).kind.optimizer:
            return None
    except CheckpointError:
        pass
    return "has no optimizer state (save_only_model): resuming from it would begin with a fresh optimizer"
