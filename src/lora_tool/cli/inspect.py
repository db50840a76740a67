"""`lora-tool inspect`: what a folder is and holds."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, open_model
from lora_tool.cli.options import UserPath, base_option, json_option
from lora_tool.display import json_data, printable
from lora_tool.errors import CheckpointError
from lora_tool.inspection.folders import inspect_checkpoint
from lora_tool.inspection.model import Inspection
from lora_tool.sources import opened, resolve


@click.command("inspect", epilog="Example: lora-tool inspect fixtures/reward-qwen2/adapter")
@click.argument("path", default=".")
@click.option("--norms/--no-norms", default=None, help="Norms of A, B and ΔW.  [default: for adapters up to 512 MiB]")
@click.option("--plot", type=UserPath(dir_okay=False), metavar="FILE", help="Draw it: .png or .html.")
@base_option("The base, for ‖ΔW‖/‖W‖ in the pictures.  [default: the one the adapter names, if it is here]")
@json_option
def command(path: str, norms: bool | None, plot: Path | None, base: str | None, as_json: bool) -> None:  # noqa: FBT001 - click passes flags by name
    """Show what PATH is: an adapter, model, checkpoint or run folder (by default this one), or an adapter's Hub id.

    For an adapter: its targets with rank, scaling, sizes and norms, its head, its base. ΔW is scaling·B·A. With
    --plot, pictures of it: how far each module moved and in how many directions, singular values, training curves.
    """
    if plot is not None and plot.suffix not in (".png", ".html"):
        raise click.BadParameter(f"{plot} ends neither in .png nor in .html", param_hint="--plot")
    checkpoint = opened(path)
    inspection = inspect_checkpoint(checkpoint, norms=norms)
    if plot is not None:
        _draw(checkpoint, inspection, plot, base)
    if as_json:
        click.echo(json.dumps(inspection_json(inspection), indent=2))
        return
    from lora_tool.cli.inspect_view import show  # noqa: PLC0415 - rich, only for people

    show(inspection, sys.stdout)


def _draw(checkpoint: Checkpoint, inspection: Inspection, plot: Path, base: str | None) -> None:
    from lora_tool.pictures.drawing import draw  # noqa: PLC0415 - matplotlib, only for pictures

    draw(checkpoint, plot, base=_base(checkpoint, base), facts=inspection.facts())
    click.echo(f"drawn: {printable(str(plot))}", err=True)


def _base(checkpoint: Checkpoint, given: str | None) -> ModelDir | None:
    """Return the base model: the given one, which must be there, or the one the adapter names, if it is at hand."""
    named = checkpoint.config.base_model if isinstance(checkpoint, AdapterDir) and checkpoint.config else None
    reference = given or named
    if reference is None:
        return None
    try:
        return open_model(resolve(reference, near=checkpoint.folder.root).path)
    except CheckpointError:
        if given:
            raise
        return None


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """Return the inspection as JSON data. Names from files are escaped; NaN and infinities are null."""
    return {"schema_version": 1, **json_data(dataclasses.asdict(inspection))}
