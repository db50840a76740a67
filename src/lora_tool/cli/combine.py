"""`lora-tool combine`: several adapters → one, whose ΔW is their weighted sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.cli.algebra import rank_options
from lora_tool.cli.options import FolderOrId, base_option, ignore_option
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import carry_out, run_options, writing_options
from lora_tool.execution.folder import check_output
from lora_tool.hub_names import ANYWHERE
from lora_tool.machine import one_arena
from lora_tool.sources import opened_adapter
from lora_tool.tensors import DType
from lora_tool.weighted import all_weighted, place_of


@click.command("combine", cls=Timed, epilog="Example: lora-tool combine helpful/=0.7 harmless/=0.3 -o both/")
@click.argument("adapters", nargs=-1, required=True, type=FolderOrId(), metavar="ADAPTER[=WEIGHT]...")
@rank_options
@click.option(
    "--head-of",
    type=FolderOrId(),
    metavar="ADAPTER",
    help="Adapter to take the head and other whole tensors from if the adapters' differ.",
)
@base_option(f"Base model of all adapters: {ANYWHERE}.  [default: the one in their configs]")
@ignore_option()
@writing_options(verify=True)
@run_options
def command(
    adapters: tuple[str, ...],
    *,
    output: Path,
    rank: int | None,
    keep: float | None,
    head_of: str | None,
    base: str | None,
    dtype: DType | None,
    ignore: tuple[str, ...],
    overwrite: bool,
    resume: bool,
    **how: Any,  # the arguments of `carry_out`
) -> None:
    """Write one adapter whose ΔW is the weighted sum of the ΔW of each ADAPTER.

    Without --rank and --keep the sum is exact: factors are concatenated and ranks add up. With either, each module gets
    the best approximation of its rank, and --dry-run shows how much that keeps. The adapters may differ in ranks,
    alphas, rsLoRA and data types. ΔW is never formed, and neither torch nor the base model is needed.
    """
    one_arena()
    names, weights = all_weighted(adapters, None)
    opened = tuple(map(opened_adapter, names))
    check_output(output, overwrite=overwrite or resume, inputs=tuple(each.root for each in opened))
    from lora_tool.plan.algebra.plan_combine import plan_combine  # after the options

    chosen = None if head_of is None else opened[place_of(head_of, names)]
    plan = plan_combine(
        opened, weights=weights, rank=rank, keep=keep, head_of=chosen, base=base, dtype=dtype, ignore=ignore
    )
    carry_out(plan, output, overwrite=overwrite, resume=resume, **how)
