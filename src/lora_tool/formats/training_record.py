"""`lora_tool_train.json`: the record of an adapter's training that `lora-tool train` writes next to it."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from lora_tool.core.errors import BadConfig, Defect
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import read_object

FILE_NAME = "lora_tool_train.json"


class TrainingRecord(Struct, frozen=True, kw_only=True):
    """The base that an adapter was trained on. Fields that the record lacks, or that are not text, are None."""

    path: Path
    base_id: str | None
    base_revision: str | None
    base_fingerprint: str | None
    """`lora_tool.formats.manifest.fingerprint` of the base's weights."""


def read_training_record(path: Path) -> TrainingRecord:
    """Return the record in the file `path`. Raises `CorruptFile`, `BadConfig`."""
    base = read_object(path).get("base")
    if not isinstance(base, dict):
        raise BadConfig.of(path, Defect.BAD_FIELD, "expected an object with an object `base`")
    fields = Fields(base, path)
    return TrainingRecord(
        path=path,
        base_id=fields.text("hub_id") or None,
        base_revision=fields.text("revision") or None,
        base_fingerprint=fields.text("fingerprint") or None,
    )
