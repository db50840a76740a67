"""`lora-tool combine`: several adapters → one, whose ΔW is their weighted sum."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.options import FolderOrId, Timed, options_of, typed_as
from lora_tool.cli.writing import caller, run_options
from lora_tool.workflows.combine import CombineOptions, combine


@click.command("combine", cls=Timed, epilog="Example: lora-tool combine helpful/=0.7 harmless/=0.3 -o both/")
@click.argument("adapters", nargs=-1, required=True, type=FolderOrId(), metavar="ADAPTER[=WEIGHT]...")
@options_of(CombineOptions)
@run_options
def command(adapters: tuple[str, ...], **typed: Any) -> None:
    """Write one adapter whose ΔW is the weighted sum of the ΔW of each ADAPTER.

    Without --rank and --keep the sum is exact: factors are concatenated and ranks add up. With either, each module gets
    the best approximation of its rank, and --dry-run shows how much that keeps. The adapters may differ in ranks,
    alphas, rsLoRA and data types. ΔW is never formed, and neither torch nor the base model is needed.
    """
    combine(adapters, typed_as(CombineOptions, typed), caller(typed))
