"""`lora-tool resize`: an adapter → the nearest one of lower rank."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.options import FolderOrId, Timed, options_of, typed_as
from lora_tool.cli.writing import caller, run_options
from lora_tool.workflows.resize import ResizeOptions, resize


@click.command("resize", cls=Timed, epilog="Example: lora-tool resize my-adapter/ --rank 16 -o my-small-adapter/")
@click.argument("adapter", type=FolderOrId(), metavar="ADAPTER")
@options_of(ResizeOptions)
@run_options
def command(adapter: str, **typed: Any) -> None:
    """Write ADAPTER at lower ranks: each module gets the closest ΔW of its new rank.

    Give --rank or --keep. Before writing anything, --dry-run shows how much is kept, which module keeps least, and
    which rank would keep 99 %. ΔW is never formed, and neither torch nor the base model is needed.
    """
    resize(adapter, typed_as(ResizeOptions, typed), caller(typed))
