"""`lora-tool extract`: a fine-tuned model and its base → the adapter between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.cli.algebra import rank_options
from lora_tool.cli.options import FolderOrId, base_option, jobs_option
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import carry_out, run_options
from lora_tool.execution.folder import check_output
from lora_tool.hub_names import ANYWHERE
from lora_tool.machine import one_arena
from lora_tool.sources import opened_model
from lora_tool.tensors import DType


@click.command(
    "extract", cls=Timed, epilog="Example: lora-tool extract my-model/ --base base-model/ --rank 64 -o my-adapter/"
)
@click.argument("model", type=FolderOrId(), metavar="MODEL")
@base_option(f"The model that MODEL was trained from: {ANYWHERE}.")
@rank_options
@click.option("--save", "save", multiple=True, metavar="MODULE", help="Save this module whole. May be repeated.")
@jobs_option
@click.option(
    "--verify/--no-verify",
    default=True,
    help="Read samples back and check them before the output gets its name.",
    show_default=True,
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output of lora-tool once the new one is complete.")
@run_options
def command(
    model: str,
    *,
    base: str | None,
    output: Path,
    rank: int | None,
    keep: float | None,
    save: tuple[str, ...],
    dtype: DType | None,
    overwrite: bool,
    **how: Any,  # the arguments of `carry_out`
) -> None:
    """Write the adapter that turns the base into MODEL, as closely as its ranks allow.

    Both models are read four times, in blocks; no matrix is decomposed whole. For each module it reports how much does
    not fit in the rank, and how much rounding the weights to 16 bits explains. Norms, embeddings and heads are saved
    whole, so a reward model and its causal base give a reward adapter.
    """
    if base is None:
        raise click.UsageError("missing option --base: give the model that MODEL was trained from")
    if (rank is None) == (keep is None):
        raise click.UsageError("give either --rank or --keep")
    one_arena()
    tuned, first = opened_model(model, download=True), opened_model(base, download=True)
    check_output(output, overwrite=overwrite, inputs=(tuned.root, first.root))
    from lora_tool.pipeline.algebra import extraction  # after the options

    with extraction(tuned, first, output, rank=rank, keep=keep, save=save, dtype=dtype) as plan:
        carry_out(plan, output, overwrite=overwrite, resume=False, **how)
