"""`lora-tool consolidate`: rank files of a training run → an adapter, a model or a state dict."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.options import FolderOrId, Timed, options_of, typed_as
from lora_tool.cli.writing import caller, part_option, run_options
from lora_tool.workflows.consolidate import ConsolidateOptions, consolidate


@click.command("consolidate", cls=Timed, epilog="Example: lora-tool consolidate run/checkpoint-500 -o my-adapter/")
@click.argument("checkpoint", type=FolderOrId(), metavar="[CKPT]", default=".")
@options_of(ConsolidateOptions)
@part_option
@run_options
def command(checkpoint: str, **typed: Any) -> None:
    """Reassemble the rank files of a DeepSpeed, FSDP, verl or Megatron checkpoint.

    CKPT is the folder that training wrote (by default this one), here or on the Hub; it holds global_step… folders or
    .metadata. Code in its pickles is never run.
    """
    consolidate(checkpoint, typed_as(ConsolidateOptions, typed), caller(typed))
