"""`lora-tool inspect`: what a folder is and holds, or several side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from msgspec.structs import asdict

from lora_tool.cli.options import FolderOrId, base_option, json_option, plot_option
from lora_tool.display import json_data, json_text, printable
from lora_tool.inspection.folders import inspect_checkpoint
from lora_tool.inspection.model import Inspection
from lora_tool.sources import opened, opened_model


@click.command("inspect", epilog="Example: lora-tool inspect fixtures/reward-qwen2/adapter")
@click.argument("paths", nargs=-1, type=FolderOrId(), metavar="[PATH]...")
@click.option("--norms/--no-norms", default=None, help="Norms of A, B and ΔW.  [default: for adapters up to 512 MiB]")
@plot_option("Draw it")
@base_option(
    "Base model, for ‖ΔW‖/‖W‖ in the pictures.  [default: the one in the adapter's config, if it is on this disk]"
)
@json_option
def command(paths: tuple[str, ...], *, norms: bool | None, plot: Path | None, base: str | None, as_json: bool) -> None:
    """Show what PATH holds: an adapter, model, checkpoint or run folder (by default this one), or an adapter on the
    Hub: owner/name[@revision], hf://owner/name or the URL of its page. Several are shown side by side.

    For an adapter: its targets with rank, scaling, sizes and norms, its head, its base, and what made it. ΔW is
    scaling·B·A. --plot draws how far each module moved and in how many directions, singular values and training curves.
    --json gives the numbers of every module.
    """
    if plot is not None and len(paths) > 1:
        raise click.UsageError("--plot draws one folder; lora-tool diff A B --plot FILE draws the difference of two")
    checkpoints = [opened(path) for path in paths or (".",)]
    inspections = [inspect_checkpoint(each, norms=norms, spectra=as_json) for each in checkpoints]
    if plot is not None:
        from lora_tool.pictures.drawing import draw  # matplotlib, only for pictures
        from lora_tool.validation.bases import named_base

        (checkpoint,), (inspection,) = checkpoints, inspections
        root = checkpoint.folder.root
        model = opened_model(base, near=root, download=False) if base else named_base(checkpoint)[0]
        draw(checkpoint, plot, base=model, facts=inspection.facts())
        click.echo(f"drawn: {printable(str(plot))}", err=True)
    if as_json:
        click.echo(_json(inspections))
        return
    if len(inspections) > 1:
        from lora_tool.cli.inspect_several import show_several  # rich, only for people

        show_several(inspections, sys.stdout)
        return
    from lora_tool.cli.inspect_view import show_inspection  # rich, only for people

    show_inspection(inspections[0], sys.stdout)


def _json(inspections: Sequence[Inspection]) -> str:
    """Return the inspections as JSON, `inspection/inspect.schema.json`: a module, a tensor, a checkpoint is a line."""
    if len(inspections) == 1:
        return json_text(json_data({"schema_version": 1, **asdict(inspections[0])}), spread=2)
    return json_text(json_data({"schema_version": 1, "folders": inspections}), spread=4)
