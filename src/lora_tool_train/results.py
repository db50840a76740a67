"""The folder that a training saves into: cleared before it begins, judged when it has ended."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.checkpoints.sources import resolve
from lora_tool.core.errors import CheckpointError
from lora_tool.core.report import Finding, Severity
from lora_tool.formats.manifest import fingerprint
from lora_tool.formats.training_record import FILE_NAME
from lora_tool.verification.validating import validate
from lora_tool_train.methods import Method
from lora_tool_train.traps import trap

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
