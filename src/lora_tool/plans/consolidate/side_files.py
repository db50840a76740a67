"""The files next to consolidated weights: copies of those near the checkpoint, and the new config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lora_tool.checkpoints.folders import listed
from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.core.tensors import FLOAT_NAMES, DType
from lora_tool.formats import generation_config, model_config, tokenizer
from lora_tool.formats.files import is_folder, json_bytes, read_object, require_own_file
from lora_tool.plans.core.steps import SideFile, copied_file


def model_files(state: TrainingState, dtype: DType) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Return a model's files near the checkpoint, the config with the `dtype` that is written; and warnings, where none is near.

    Raises `BrokenFile` for a config that cannot be read, and as `tokenizer_files`.
    """
    path = _find(state, model_config.FILE_NAME)
    tokenizers = tuple(tokenizer_files(state))
    if path is None:
        places = ", ".join(map(str, state.near))
        return tokenizers, (f"no config.json in {places}: the folder needs one before transformers can load it",)
    require_own_file(path.parent, path)
    raw = read_object(path)
    # transformers 4 wrote `torch_dtype`, 5 writes `dtype` and reads both
    raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = FLOAT_NAMES[dtype]
    reason = f"that of {path.parent}, with the dtype of the written weights"
    config = SideFile(filename=model_config.FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason=reason)
    generation = _find(state, generation_config.FILE_NAME)
    copied = [copied_file(generation.parent, generation.name, generation.parent)] if generation else []
    return (config, *copied, *tokenizers), ()


def tokenizer_files(state: TrainingState) -> Iterator[SideFile]:
    """Yield the tokenizer's files of the nearest folder that has some, and its named chat templates.

    Raises `CorruptFile` for one that is not a regular file inside its folder.
    """
    for folder in state.near:
        names = [name for name in sorted(tokenizer.FILE_NAMES) if _is_there(folder, name)]
        if names:
            names += tokenizer.templates_among(listed(folder / tokenizer.TEMPLATES))
            yield from (copied_file(folder, name, folder) for name in names)
            return


def _find(state: TrainingState, name: str) -> Path | None:
    return next((folder / name for folder in state.near if _is_there(folder, name)), None)


def _is_there(folder: Path, name: str) -> bool:
    """Return whether the folder has the file, also where it is a link that leads nowhere: it is named, not left out."""
    return os.path.lexists(folder / name) and not is_folder(folder / name)
