"""`lora-tool extract`: a fine-tuned model and its base → the adapter between them."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.options import FolderOrId, Timed, options_of, typed_as
from lora_tool.cli.writing import caller, run_options
from lora_tool.core.hub_names import ANYWHERE
from lora_tool.workflows.extract import ExtractOptions, extract


@click.command(
    "extract", cls=Timed, epilog="Example: lora-tool extract my-model/ --base base-model/ --rank 64 -o my-adapter/"
)
@click.argument("model", type=FolderOrId(), metavar="MODEL")
@click.option(
    "--base",
    type=FolderOrId(),
    metavar="MODEL",
    help=f"The model that MODEL was trained from: {ANYWHERE}.  [default: the one that its lora_tool.json or config.json "
    "names, if it is on this disk]",
)
@options_of(ExtractOptions)
@run_options
def command(model: str, *, base: str | None, **typed: Any) -> None:
    """Write the adapter that turns the base into MODEL, as closely as its ranks allow.

    Both models are read four times, in blocks; no matrix is decomposed whole. For each module it reports how much does
    not fit in the rank, and how much rounding the weights to 16 bits explains. Norms, embeddings and heads are saved
    whole, so a reward model and its causal base give a reward adapter.
    """
    extract(model, base, typed_as(ExtractOptions, typed), caller(typed))
