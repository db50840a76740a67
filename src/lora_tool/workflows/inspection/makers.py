"""Which versions of which packages made a folder, from every file in it that records some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir
from lora_tool.core.errors import BrokenFile
from lora_tool.formats import model_card, training_record
from lora_tool.formats.files import inside, read_object


def versions_of(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return package → version; of several records of one package the config's counts, which its library wrote."""
    found: dict[str, str] = {}
    for record in _records(checkpoint):
        for package, version in record.items():
            if isinstance(version, str) and version:
                found.setdefault(package, version)
    return found


def _records(checkpoint: Checkpoint) -> Iterator[Mapping[str, object]]:
    if isinstance(checkpoint, AdapterDir) and checkpoint.config:
        yield {"peft": checkpoint.config.peft_version}
    if isinstance(checkpoint, ModelDir):
        if checkpoint.config:
            yield {"transformers": checkpoint.config.raw.get("transformers_version")}
        yield _table(checkpoint.manifest.raw if checkpoint.manifest else {})
    folder = checkpoint.folder
    path = folder.root / training_record.FILE_NAME
    if path.name in folder.files and inside(folder.root, path):
        with contextlib.suppress(BrokenFile):  # `validate` says what is wrong with it
            yield _table(read_object(path))
    path = folder.root / model_card.FILE_NAME
    if path.name in folder.files and inside(folder.root, path):
        yield model_card.framework_versions(path)


def _table(raw: Mapping[str, object]) -> Mapping[str, object]:
    versions = raw.get("versions")
    return versions if isinstance(versions, dict) else {}
