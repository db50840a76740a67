"""Drawing what a checkpoint folder holds to a file: a page or a picture, by the file's name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from threadpoolctl import threadpool_limits

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, RunDir
from lora_tool.display import printable
from lora_tool.errors import NotACheckpoint
from lora_tool.execution.folder import replace_file
from lora_tool.inspection.curves import trainer_state_of, training_curves
from lora_tool.inspection.spectra import spectra
from lora_tool.pictures.figures import adapter_figure
from lora_tool.pictures.grid import grids
from lora_tool.pictures.page import page
from lora_tool.pictures.saving import save
from lora_tool.validation.bases import last_adapter


def draw(
    checkpoint: Checkpoint, path: Path, *, base: ModelDir | None = None, facts: Iterable[tuple[str, str]] = ()
) -> Path:
    """Write the pictures of an adapter, with its run's curves where it holds a `trainer_state.json`, and return `path`.

    Of a run folder the adapter is that of its latest checkpoint. A `path` that ends in ``.html`` becomes a page, in
    ``.svg`` or ``.pdf`` lines and text, any other a PNG. It appears complete or not at all, and replaces a file of that name. Raises `NotACheckpoint` where
    there is nothing to draw, `OSError` where weights cannot be read, `ExecutionError`.
    """
    with threadpool_limits(limits=1, user_api="blas"):  # factors are small: threads would only wait for each other
        adapter = last_adapter(checkpoint) if isinstance(checkpoint, RunDir) else checkpoint
        found = tuple(spectra(adapter, base)) if isinstance(adapter, AdapterDir) else ()
    root = checkpoint.folder.root
    trainer = trainer_state_of(checkpoint.folder)
    curves = training_curves(trainer) if trainer else {}
    if not found and not curves:
        raise NotACheckpoint(
            f"{root} holds no LoRA pairs and no training log: there is nothing to draw",
            hint="give an adapter, a trainer checkpoint or a run folder",
        )
    maps = grids(found) if found else ()
    latest = f" · {adapter.root.name}" if isinstance(checkpoint, RunDir) and adapter is not None else ""
    title = printable(f"{root.resolve().name}{latest}")
    if path.suffix == ".html":
        dora = isinstance(adapter, AdapterDir) and adapter.config is not None and adapter.config.use_dora
        replace_file(path, page(title, facts, maps, found, curves, dora=dora).encode())
    else:
        save(adapter_figure(title, maps, found, curves), path)
    return path
