"""The base model that a checkpoint names, where it is on this disk."""

from __future__ import annotations

from pathlib import Path

from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    NamedAdapters,
    RunDir,
    base_around,
    open_checkpoint,
    open_model,
    saves_in,
)
from lora_tool.checkpoints.sources import local_folder, may_hold, resolve
from lora_tool.core.errors import CheckpointError
from lora_tool.core.progress import decided
from lora_tool.formats.quantised.names import quantised_by_name
from lora_tool.rules.judging import NO_BASE


def named_base(checkpoint: Checkpoint, near: Path | None = None) -> tuple[ModelDir | None, str]:
    """Return the base that the adapter's config names, if it is on this disk, else None and why it is not.

    The base of a run is that of its last adapter. A relative path is searched in the working directory and in the
    folder `near`, by default the adapter's own, and those above it. Nothing is downloaded.
    """
    adapter = last_adapter(checkpoint) if isinstance(checkpoint, RunDir) else checkpoint
    if isinstance(adapter, NamedAdapters):
        adapter = adapter.adapters[0]
    config = adapter.config if isinstance(adapter, AdapterDir) else None
    if adapter is None or config is None:
        return None, NO_BASE
    try:
        if not config.base_model:
            around = base_around(adapter) if isinstance(adapter, AdapterDir) else None
            return (open_model(around), "") if around else (None, NO_BASE)
        near = near or adapter.root
        near_by = local_folder(config.base_model, near) is not None
        if not near_by and not may_hold(config.base_model):  # asking huggingface_hub takes half a second
            by_name = quantised_by_name(config.base_model)
            return (
                None,
                f"no base model (use --base): {config.base_model} is neither a folder nor in the Hub cache{by_name}",
            )
        found = resolve(config.base_model, near=near, revision=config.revision).path
        decided(f"base: {found}, named in {config.path}")
        return open_model(found), ""
    except CheckpointError as error:
        return None, f"no base model (use --base): {error}"


def last_adapter(run: RunDir) -> AdapterDir | None:
    """Return the adapter of the run's latest checkpoint that has one, None where none has."""
    for name in reversed(saves_in(run.folder)):
        try:
            opened = open_checkpoint(run.root / name)
        except CheckpointError:
            continue
        if isinstance(opened, NamedAdapters):
            return opened.adapters[0]
        if isinstance(opened, AdapterDir):
            return opened
    return None
