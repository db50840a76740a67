"""`lora-tool resize`: an adapter → the nearest one of lower rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.cli.algebra import rank_options
from lora_tool.cli.options import FolderOrId, ignore_option
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import carry_out, run_options, writing_options
from lora_tool.execution.folder import check_output
from lora_tool.machine import one_arena
from lora_tool.sources import opened_adapter
from lora_tool.tensors import DType


@click.command("resize", cls=Timed, epilog="Example: lora-tool resize my-adapter/ --rank 16 -o my-small-adapter/")
@click.argument("adapter", type=FolderOrId(), metavar="ADAPTER")
@rank_options
@ignore_option()
@writing_options(verify=True)
@run_options
def command(
    adapter: str,
    *,
    output: Path,
    rank: int | None,
    keep: float | None,
    dtype: DType | None,
    ignore: tuple[str, ...],
    overwrite: bool,
    resume: bool,
    **how: Any,  # the arguments of `carry_out`
) -> None:
    """Write ADAPTER at lower ranks: each module gets the closest ΔW of its new rank.

    Give --rank or --keep. Before writing anything, --dry-run shows how much is kept, which module keeps least, and
    which rank would keep 99 %. ΔW is never formed, and neither torch nor the base model is needed.
    """
    if (rank is None) == (keep is None):
        raise click.UsageError("give either --rank or --keep")
    one_arena()
    opened = opened_adapter(adapter)
    check_output(output, overwrite=overwrite or resume, inputs=(opened.root,))
    from lora_tool.plan.algebra.plan_combine import plan_resize  # after the options

    plan = plan_resize(opened, rank=rank, keep=keep, dtype=dtype, ignore=ignore)
    carry_out(plan, output, overwrite=overwrite, resume=resume, **how)
