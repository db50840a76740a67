"""Drawing what a checkpoint folder holds to a file: HTML by the file's name, or else PNG."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from threadpoolctl import threadpool_limits

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, RunDir
from lora_tool.checkpoint.folders import read_folder
from lora_tool.display import printable
from lora_tool.errors import NotACheckpoint
from lora_tool.execution.folder import replace_file
from lora_tool.inspection.spectra import spectra
from lora_tool.pictures.figures import adapter_figure, training_curves
from lora_tool.pictures.grid import grids
from lora_tool.pictures.page import page
from lora_tool.validation.bases import last_adapter


def draw(
    checkpoint: Checkpoint, path: Path, *, base: ModelDir | None = None, facts: Iterable[tuple[str, str]] = ()
) -> Path:
    """Write the pictures of an adapter, with its run's curves where it holds a `trainer_state.json`, and return `path`.

    Of a run folder the adapter is that of its latest checkpoint. A `path` that ends in ``.html`` becomes a page, any
    other a PNG. It appears complete or not at all, and replaces a file of that name. Raises `NotACheckpoint` where
    there is nothing to draw, `OSError` where weights cannot be read, `ExecutionError`.
    """
    with threadpool_limits(limits=1, user_api="blas"):  # factors are small: threads would only wait for each other
        adapter = last_adapter(checkpoint) if isinstance(checkpoint, RunDir) else checkpoint
        found = tuple(spectra(adapter, base)) if isinstance(adapter, AdapterDir) else ()
    root, folder = checkpoint.folder.root, checkpoint.folder
    saved = (read_folder(root / name) for name in reversed(folder.checkpoints))
    trainer = next((each.trainer for each in (folder, *saved) if each.trainer), None)
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
        picture = io.BytesIO()
        adapter_figure(title, maps, found, curves).savefig(picture, format="png", dpi=150)
        replace_file(path, picture.getvalue())
    return path
