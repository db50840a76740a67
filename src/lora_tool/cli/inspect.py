"""`lora-tool inspect`: what a folder is and holds."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import click

from lora_tool.cli.options import FolderOrId, UserPath, base_option, json_option
from lora_tool.cli.terminal import print_json
from lora_tool.display import printable
from lora_tool.inspection.folders import inspect_checkpoint
from lora_tool.sources import opened, opened_model


@click.command("inspect", epilog="Example: lora-tool inspect fixtures/reward-qwen2/adapter")
@click.argument("path", type=FolderOrId(), default=".")
@click.option("--norms/--no-norms", default=None, help="Norms of A, B and ΔW.  [default: for adapters up to 512 MiB]")
@click.option("--plot", type=UserPath(dir_okay=False), metavar="FILE", help="Draw it: .png or .html.")
@base_option("The base, for ‖ΔW‖/‖W‖ in the pictures.  [default: the one the adapter names, if it is here]")
@json_option
def command(path: str, norms: bool | None, plot: Path | None, base: str | None, as_json: bool) -> None:  # noqa: FBT001 - click passes flags by name
    """Show what PATH is: an adapter, model, checkpoint or run folder (by default this one), or an adapter on the Hub:
    owner/name[@revision], hf://owner/name or the URL of its page.

    For an adapter: its targets with rank, scaling, sizes and norms, its head, its base. ΔW is scaling·B·A. With
    --plot, pictures of it: how far each module moved and in how many directions, singular values, training curves.
    """
    if plot is not None and plot.suffix not in (".png", ".html"):
        raise click.BadParameter(f"{plot} ends neither in .png nor in .html", param_hint="--plot")
    checkpoint = opened(path)
    inspection = inspect_checkpoint(checkpoint, norms=norms)
    if plot is not None:
        from lora_tool.pictures.drawing import draw  # noqa: PLC0415 - matplotlib, only for pictures
        from lora_tool.validation.bases import named_base  # noqa: PLC0415

        root = checkpoint.folder.root
        model = opened_model(base, near=root, download=False) if base else named_base(checkpoint)[0]
        draw(checkpoint, plot, base=model, facts=inspection.facts())
        click.echo(f"drawn: {printable(str(plot))}", err=True)
    if as_json:
        print_json(**dataclasses.asdict(inspection))
        return
    from lora_tool.cli.inspect_view import show_inspection  # noqa: PLC0415 - rich, only for people

    show_inspection(inspection, sys.stdout)
