"""Adapters that were computed or converted, with their inputs, so that verify can compute them again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from lora_tool.adapters.mlx import is_mlx, read_mlx
from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import ADAPTER, AdapterDir, require_whole
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.sources import Reference, opened_adapter
from lora_tool.core.tensors import TensorTable
from lora_tool.formats import manifest as manifest_format
from lora_tool.formats.files import is_file
from lora_tool.formats.manifest import Manifest, read_manifest
from lora_tool.plans.algebra.provenance import (
    ExtractInputs,
    SumInputs,
    WrittenAdapter,
    extract_inputs,
    recorded_adapter,
    sum_inputs,
)
from lora_tool.plans.convert.provenance import ConvertInputs, convert_inputs

ComputedInputs: TypeAlias = SumInputs | ExtractInputs | ConvertInputs
"""A computed adapter with its inputs: of a sum, a difference of models, or another form of one adapter."""


def find_computed(
    folder: Reference, adapters: Sequence[Reference] = (), *, base: Reference | None = None
) -> ComputedInputs | None:
    """Return a computed adapter with what its manifest says it was computed from; None for anything else.

    `adapters` and `base` replace those that the manifest names. Raises `NotACheckpoint` for an input that does not
    exist any more, and as `open_checkpoint`.
    """
    written = _written(folder, adapters)
    if written is None:
        return None
    match written.manifest.raw.get("operation"), written.manifest.raw.get("to"):
        case ("combine" | "resize" | "prepare", _) | ("convert", "mlx"):
            require_whole(written.made)
            return sum_inputs(written, adapters, base)
        case "convert", "peft" | "peft-experts" | "peft-fused":
            require_whole(written.made)
            return convert_inputs(written, adapters, base)
        case "extract", _:
            require_whole(written.made)
            return extract_inputs(written, base)
        case _:
            return None


def _written(folder: Reference, adapters: Sequence[Reference]) -> WrittenAdapter | None:
    """Return the adapter of a folder that has a manifest, too; None of any other, which is not opened."""
    opened, root = (None, Path(folder)) if isinstance(folder, str | os.PathLike) else (folder, folder.root)
    path = root / manifest_format.FILE_NAME
    listed = read_folder(path.parent) if is_file(path) else None
    if listed is None:
        return None
    if opened is None and is_mlx(listed):
        manifest = read_manifest(path)
        mlx = read_mlx(path.parent, _experts_of(manifest, path.parent, adapters))
        return WrittenAdapter(made=mlx.adapter, stored=mlx.stored, manifest=manifest)
    if opened is None and ADAPTER.recognise(listed) is not None:
        opened = ADAPTER.open(listed)
    if not isinstance(opened, AdapterDir):
        return None
    return WrittenAdapter(made=opened, stored=opened.weights, manifest=read_manifest(path))


def _experts_of(manifest: Manifest, root: Path, adapters: Sequence[Reference]) -> TensorTable:
    """Return the base's names of the weights under the first input's LoRA: MLX-LM's stack lacks the experts' names."""
    entry = manifest.input("adapter")
    if not adapters and not entry:
        return {}
    view = view_of(opened_adapter(adapters[0]) if adapters else recorded_adapter(entry, root))
    return {f"{layer.target}.weight": layer.any_tensor for layer in view.layers}
