"""An adapter that is to be converted, PEFT's or MLX-LM's, as PEFT has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from lora_tool.adapters.mlx import is_mlx, read_mlx
from lora_tool.checkpoints import AdapterDir
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model
from lora_tool.formats.files import expanded


class Convertible(Struct, frozen=True, kw_only=True):
    """An adapter that is to be converted, as PEFT has it."""

    adapter: AdapterDir
    rebuilt: Mapping[str, Any] | None = None
    """The fields of PEFT's config, of an adapter of another program."""


def convertible(reference: Reference, base: Reference | None = None) -> Convertible:
    """Return the adapter that is named: PEFT's, or MLX-LM's in a folder here. Raises as `opened_adapter`, `read_mlx`."""
    folder = expanded(reference) if isinstance(reference, str | os.PathLike) else None
    if folder is None or not folder.is_dir() or not is_mlx(read_folder(folder)):
        return Convertible(adapter=opened_adapter(reference))
    model = None if base is None else opened_model(base, near=folder)
    found = read_mlx(folder, None if model is None else model.tensors)
    named = {} if model is None else {"base_model_name_or_path": str(model.root.resolve())}
    return Convertible(adapter=found.adapter, rebuilt={**found.fields, **named})
