"""The files beside consolidated weights: copies of those near the checkpoint, and the config of what is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_tool.formats import generation_config, model_config, tokenizer
from lora_tool.formats.files import inside, json_bytes, read_json
from lora_tool.plan.core.steps import SideFile
from lora_tool.sharded.state import TrainingState
from lora_tool.tensors import FLOAT_NAMES, DType


def model_files(state: TrainingState, dtype: DType) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Return a model's files near the checkpoint, the config with the `dtype` that is written; and warnings, where none is near."""
    path = _find(state, model_config.FILE_NAME)
    tokenizers = tuple(tokenizer_files(state))
    if path is None:
        places = ", ".join(map(str, state.near))
        return tokenizers, (f"no config.json in {places}: the folder needs one before transformers can load it",)
    raw: dict[str, Any] = dict(read_json(path))
    # transformers 4 wrote `torch_dtype`, 5 writes `dtype` and reads both
    raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = FLOAT_NAMES[dtype]
    reason = f"that of {path.parent}, with the dtype of the written weights"
    config = SideFile(filename=model_config.FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason=reason)
    generation = _find(state, generation_config.FILE_NAME)
    copied = (
        [SideFile(filename=generation_config.FILE_NAME, source=generation, reason=f"copied from {generation.parent}")]
        if generation
        else []
    )
    return (config, *copied, *tokenizers), ()


def tokenizer_files(state: TrainingState) -> Iterator[SideFile]:
    """Yield the tokenizer's files of the nearest folder that has some."""
    for folder in state.near:
        names = [name for name in sorted(tokenizer.FILE_NAMES) if _is_own_file(folder, name)]
        if names:
            for name in names:
                yield SideFile(filename=name, source=folder / name, reason=f"copied from {folder}")
            return


def _find(state: TrainingState, name: str) -> Path | None:
    return next((folder / name for folder in state.near if _is_own_file(folder, name)), None)


def _is_own_file(folder: Path, name: str) -> bool:
    return (folder / name).is_file() and inside(folder, folder / name)
