"""`generation_config.json` of transformers: here only its `eos_token_id`, the tokens after which a model stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_tool.core.errors import BrokenFile
from lora_tool.formats.files import read_object
from lora_tool.formats.model_config import ModelConfig

FILE_NAME = "generation_config.json"


def read_generation_config(root: Path) -> Mapping[str, Any]:
    """Return the generation config in the folder `root`; empty where there is none, or none that can be read."""
    try:
        return read_object(root / FILE_NAME)
    except BrokenFile:
        return {}  # that it cannot be read is a finding of its own


def ends_of(config: ModelConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids after which `generate` stops: the generation config's, without one `config.json`'s."""
    text = config.raw.get("text_config")
    nested = text if isinstance(text, dict) else {}
    for table in (generation, config.raw, nested):
        if ends := ids(table.get("eos_token_id")):
            return ends
    return ()


def ids(value: object) -> tuple[int, ...]:
    """Return an `eos_token_id` as ids: it is one number or a list of them."""
    return tuple(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)
