"""`lora_tool_train.json`: what `lora-tool train` writes beside an adapter about its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool.errors import BadConfig, Defect, Problem
from lora_tool.formats.files import read_json

FILE_NAME = "lora_tool_train.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """What an adapter was trained on. Fields that the record does not have, or not as text, are None."""

    path: Path
    base_id: str | None
    base_revision: str | None
    base_fingerprint: str | None
    """`lora_tool.plan.core.manifest.fingerprint` of the base's weights."""


def read_training_record(path: Path) -> TrainingRecord:
    """Return the record in the file `path`. Raises `CorruptFile`, `BadConfig`."""
    raw = read_json(path)
    base: Any = raw.get("base") if isinstance(raw, dict) else None
    if not isinstance(base, dict):
        message = "expected an object with an object `base`"
        raise BadConfig(Problem(defect=Defect.BAD_FIELD, path=str(path), message=message))

    def text(name: str) -> str | None:
        value = base.get(name)
        return value if isinstance(value, str) and value else None

    return TrainingRecord(
        path=path,
        base_id=text("hub_id"),
        base_revision=text("revision"),
        base_fingerprint=text("fingerprint"),
    )
