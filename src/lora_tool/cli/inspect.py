"""`lora-tool inspect`: what a folder is and holds, or several side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lora_tool.cli.options import FolderOrId, json_option, options_of, plot_option, say_drawn, typed_as
from lora_tool.core.display import json_data, json_text
from lora_tool.workflows.inspect import InspectEachOptions, inspect_each
from lora_tool.workflows.inspection.model import Inspection


@click.command("inspect", epilog="Example: lora-tool inspect fixtures/reward-qwen2/adapter")
@click.argument("paths", nargs=-1, type=FolderOrId(), metavar="[PATH]...")
@options_of(InspectEachOptions)
@plot_option("Draw it")
@json_option
def command(paths: tuple[str, ...], *, plot: Path | None, as_json: bool, **typed: Any) -> None:
    """Show what PATH holds: an adapter, model, checkpoint or run folder (by default this one), or an adapter on the
    Hub: owner/name[@revision], hf://owner/name or the URL of its page. Several are shown side by side.

    For an adapter: its targets with rank, scaling, sizes and norms, its head, its base, and what made it. ΔW is
    scaling·B·A. --plot draws how far each module moved and in how many directions, singular values and training curves.
    --json gives the numbers of every module.
    """
    inspections = inspect_each(paths or (".",), typed_as(InspectEachOptions, typed, plot=plot, spectra=as_json))
    if plot is not None:
        say_drawn(plot)
    if as_json:
        click.echo(_json(inspections))
    elif len(inspections) > 1:
        from lora_tool.cli.inspect_view import show_several  # rich, only for people

        show_several(inspections, sys.stdout)
    else:
        from lora_tool.cli.inspect_view import show_inspection  # rich, only for people

        show_inspection(inspections[0], sys.stdout)


def _json(inspections: Sequence[Inspection]) -> str:
    """Return the inspections as JSON, `inspection/inspect.schema.json`: a module, a tensor, a checkpoint is a line."""
    if len(inspections) == 1:
        return json_text(inspections[0].to_json(), spread=2)
    return json_text(json_data({"schema_version": 1, "folders": inspections}), spread=4)
