"""What a training saves: its folder is cleared before it begins, judged when it has ended, and may be resumed from."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint, saves_in
from lora_tool.checkpoints.folders import is_numbered, read_folder
from lora_tool.checkpoints.sources import resolve
from lora_tool.core.errors import CheckpointError
from lora_tool.core.report import Finding, Severity
from lora_tool.formats.manifest import fingerprint
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.formats.training_record import FILE_NAME
from lora_tool.verification.validating import judge_save, validate
from lora_tool_train.methods import Method
from lora_tool_train.traps import TrainingFailed, trap

REJECTED = "rejected"
SUPERSEDED = "superseded"
_WEIGHTS = ("adapter_model*", "model*.safetensors*", "pytorch_model*.bin*")
_DESCRIBING = ("adapter_config.json", "config.json", FILE_NAME)
"""Files with the weights that describe them."""


def weight_files(folder: Path) -> list[str]:
    """Return the names of the weights files that lie directly in `folder`: those that make it look finished."""
    return sorted(path.name for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file())


def clear_output(output: Path, aside: str = SUPERSEDED) -> None:
    """Move the weights in `output` into the folder `aside` of it, so that none look like those of a good run."""
    names = weight_files(output)
    if not names:
        return
    numbered = (output / f"{aside}-{number}" for number in itertools.count(2))
    place = next(path for path in itertools.chain([output / aside], numbered) if not path.exists())
    place.mkdir()
    for name in (*names, *_DESCRIBING):  # the weights first: the folder must not look finished meanwhile
        if (output / name).is_file():
            (output / name).replace(place / name)


def judge_saved(folder: Path, method: Method) -> tuple[Finding, ...]:
    """Return the errors that `lora-tool validate` finds in a saved result; every value of an adapter is read."""
    try:
        opened = open_checkpoint(folder)
    except CheckpointError as wrong:
        return (trap("bad-result", wrong.hint or "lora-tool validate", where=folder.name, why=wrong),)
    task = "reward" if method.name == "reward" else None
    report = validate(opened, task=task, deep=True if isinstance(opened, AdapterDir) else None)
    return tuple(report.at_least(Severity.ERROR))


_LOST = frozenset({"LT206", "LT216", "LT227", "LT301", "LT302", "LT416"})
"""The rules that find trained weights missing, whatever else other ranks are still writing."""


def lost_in(checkpoint: Path) -> Finding | None:
    """Return the finding that trained weights are not in a checkpoint that was saved just now, None if they are."""
    try:
        findings = validate(checkpoint, select=_LOST).findings
    except CheckpointError:  # other ranks may not have written their files yet
        return None
    return next((found for found in findings if found.severity is Severity.ERROR), None)


def record(folder: Path, method: Method, *, base: str, revision: str | None) -> None:
    """Write the adapter's base and method into its folder: LT5xx rules compare a base with its fingerprint there.

    No path of this machine is in it: a base is known again by its fingerprint, and by its Hub id if it has one.
    """
    table = {"schema_version": 1, "method": method.name, "task_type": method.task_type, "base": _base(base, revision)}
    (folder / FILE_NAME).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _base(base: str, revision: str | None) -> dict[str, Any]:
    try:
        source = resolve(base, revision=revision)
        opened = open_checkpoint(source.path)
    except CheckpointError:
        return {"hub_id": None if Path(base).exists() else base, "revision": revision, "fingerprint": None}
    weights = opened.weights if isinstance(opened, ModelDir) else None
    known = fingerprint(weights) if weights is not None and weights.tensors else None
    return {"hub_id": source.hub_id, "revision": source.revision, "fingerprint": known}


class ResumeChoice(Struct, frozen=True, kw_only=True):
    """The checkpoint to resume from, None for a start from step 0; `skipped` are findings about those passed over."""

    path: Path | None = None
    skipped: tuple[Finding, ...] = ()


class Saved(Struct, frozen=True, kw_only=True):
    """A folder with weights that a training left, and what is wrong with them."""

    path: Path
    errors: tuple[Finding, ...] = ()
    unchecked: str | None = None
    """The method of PEFT whose tensors no rule knows."""


def last_valid(output: Path) -> ResumeChoice:
    """Return the newest checkpoint in `output` that a run can go on from, and why newer ones were passed over.

    It is the last that is whole, not the one with the largest number.
    """
    names = tuple(filter(is_numbered, saves_in(read_folder(output)))) if output.is_dir() else ()
    skipped: list[Finding] = []
    for path in (output / name for name in reversed(names)):
        why, hint = unusable(path)
        if not why:
            return ResumeChoice(path=path, skipped=tuple(skipped))
        skipped.append(trap("unusable-checkpoint", hint, where=str(path), why=why))
    return ResumeChoice(skipped=tuple(skipped))


def named(path: Path) -> ResumeChoice:
    """Return the checkpoint that was named. Raises `TrainingFailed` if no run can go on from it."""
    why, hint = unusable(path) if path.is_dir() else ("no such folder", None)
    if why:
        raise TrainingFailed(f"{path}: cannot be resumed from: {why}", hint=f"{_OR_AUTO}; {hint}" if hint else _OR_AUTO)
    return ResumeChoice(path=path)


_OR_AUTO = "--resume auto takes the last complete checkpoint"


def unusable(path: Path) -> tuple[str, str | None]:
    """Return why transformers' Trainer cannot go on from the checkpoint `path`, "" if it can, and the command to type next.

    Every value is read.
    """
    worth = judge_save(path)
    quoted = shlex.quote(str(path))
    other = f"lora-tool ci {quoted} makes a base of it"
    if worth.incomplete is None and not (path / TRAINER_STATE).is_file():
        return f"has no {TRAINER_STATE}: it was not saved completely, or not by transformers' Trainer", other
    return worth.unresumable or "", f"lora-tool validate {quoted} --deep" if worth.bad or worth.incomplete else other


def saved_in(
    outputs: Iterable[Path], *, since: float = 0.0, trained: Mapping[str, bool] | None = None
) -> Iterator[Saved]:
    """Yield each adapter or model that lies in the folders or one level below, written at `since` or later.

    Of several adapters PEFT saves each in a folder of its name, "default" without one; those not `trained` are left out.
    """
    trained = trained or {}
    for output in outputs:
        for folder in (output, *sorted(filter(Path.is_dir, output.glob("*")))):
            is_ours = trained.get(folder.name if folder.name in trained else "default", True)
            if is_ours and any((folder / name).stat().st_mtime >= since for name in weight_files(folder)):
                with contextlib.suppress(CheckpointError):
                    yield _saved(folder)


def _saved(folder: Path) -> Saved:
    opened = open_checkpoint(folder)
    config = opened.config if isinstance(opened, AdapterDir) else None
    if config is not None and config.is_of_another_kind:
        return Saved(path=folder, unchecked=config.peft_type)
    return Saved(path=folder, errors=validate(opened).at_least(Severity.ERROR))
