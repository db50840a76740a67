"""Drawing what a checkpoint folder holds, or what differs between two, to a file: a page or a picture, by its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from threadpoolctl import threadpool_limits

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, RunDir
from lora_tool.core.display import printable
from lora_tool.core.errors import NotACheckpoint
from lora_tool.core.version import __version__
from lora_tool.execution.folder import replace_file
from lora_tool.rules.bases import last_adapter
from lora_tool.workflows.inspection.comparison import Comparison
from lora_tool.workflows.inspection.curves import Curves, trainer_state_of, training_curves
from lora_tool.workflows.inspection.spectra import Spectrum, spectra
from lora_tool_plot.changes import change_grids
from lora_tool_plot.grid import PanelGrid, grids
from lora_tool_plot.page import page
from lora_tool_plot.panels import spectra_panels
from lora_tool_plot.saving import in_folder, save
from lora_tool_plot.sheet import sheet
from lora_tool_plot.theme import themed

_IN_SUBTITLE = ("base model", "task", "method", "training", "made with", "found")
"""Facts that stand below a sheet's title."""


def draw(
    checkpoint: Checkpoint, path: Path, *, base: ModelDir | None = None, facts: Iterable[tuple[str, str]] = ()
) -> Path:
    """Write the pictures of an adapter, with its run's curves where it holds a `trainer_state.json`, and return `path`.

    Of a run folder the adapter is that of its latest checkpoint. A `path` that ends in ``.html`` becomes a page, in
    ``.svg`` or ``.pdf`` lines and text, in anything else a PNG; one that has no ending becomes a folder, with a PNG for
    each figure. A file appears complete or not at all, and replaces one of that name. Raises `NotACheckpoint` where there is nothing to draw, `OSError` where weights cannot be read,
    `ExecutionError`.
    """
    with threadpool_limits(limits=1, user_api="blas"):  # factors are small: threads would only wait for each other
        adapter = last_adapter(checkpoint) if isinstance(checkpoint, RunDir) else checkpoint
        found = tuple(spectra(adapter, base)) if isinstance(adapter, AdapterDir) else ()
    root = checkpoint.folder.root
    trainer = trainer_state_of(checkpoint.folder)
    curves = training_curves(trainer) if trainer else {}
    if not found and not curves:
        raise NotACheckpoint(
            f"{root} holds no LoRA pairs and no training log, so there is nothing to draw",
            hint="give an adapter, a trainer checkpoint or a run folder",
        )
    latest = f" · {adapter.root.name}" if isinstance(checkpoint, RunDir) and adapter is not None else ""
    dora = isinstance(adapter, AdapterDir) and adapter.config is not None and adapter.config.use_dora
    before = ", before DoRA's magnitudes" if dora else ""
    explained = f"ΔW = scaling·B·A{before}; singular values are exact, from the factors" if found else ""
    title = f"{root.resolve().name}{latest}"
    _write(path, title, list(facts), grids(found) if found else (), found, curves, explained)
    return path


def draw_comparison(comparison: Comparison, path: Path, *, names: tuple[str, str]) -> Path:
    """Write what differs between the first and second of `names` as heat maps, and return `path`; forms as of `draw`.

    Raises `NotACheckpoint` where the two have nothing in common to compare, `ExecutionError`.
    """
    maps = change_grids(comparison)
    if not maps:
        raise NotACheckpoint(
            f"{names[0]} and {names[1]} have no module or tensor in common, so there is nothing to draw"
        )
    facts = [("first", names[0]), ("second", names[1]), ("found", comparison.summary)]
    facts += [(name, " → ".join(pair)) for name, pair in comparison.fields.items()]
    ends = [PurePath(name).name or name for name in names]
    _write(path, " → ".join(ends if ends[0] != ends[1] else names), facts, maps, (), {}, "")
    return path


def _write(
    path: Path,
    title: str,
    facts: Sequence[tuple[str, str]],
    maps: Sequence[PanelGrid],
    found: Sequence[Spectrum],
    curves: Curves,
    explained: str,
) -> None:
    title = printable(title)
    footer = ". ".join(filter(None, (f"lora-tool {__version__}", explained)))
    subtitle = " · ".join(printable(value) for name, value in facts if name in _IN_SUBTITLE and value)
    with themed():
        if path.suffix == ".html":
            replace_file(path, page(title, facts, maps, found, curves, footer=footer).encode())
        elif path.suffix:
            save(sheet(title, subtitle, maps, found, curves, footer=footer), path)
        else:
            for name, one_map, modules, logged in _figures(maps, found, curves):
                save(sheet(title, subtitle, one_map, modules, logged, footer=footer), in_folder(path, name))


def _figures(
    maps: Sequence[PanelGrid], found: Sequence[Spectrum], curves: Curves
) -> Iterator[tuple[str, Sequence[PanelGrid], Sequence[Spectrum], Curves]]:
    """Yield each figure by itself, with the name of its file."""
    for grid in maps:
        yield "-".join(word for word in grid.title.lower().split() if word.isascii()), (grid,), (), {}
    if spectra_panels(found):
        yield "singular-values", (), found, {}
    if curves:
        yield "training", (), (), curves
