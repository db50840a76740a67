"""`lora-tool consolidate`: rank files of a training run → an adapter, a model or a state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.checkpoint import open_sharded
from lora_tool.choices import number_of_bytes
from lora_tool.cli.merge_options import spread_options
from lora_tool.cli.options import FolderOrId, UserPath, ignore_option, rank_file_options
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import (
    ChoiceOf,
    Parsed,
    carry_out,
    part_option,
    run_options,
    writing_options,
)
from lora_tool.cluster.spread import EngineName, spread_over
from lora_tool.execution.folder import check_output
from lora_tool.pipeline.consolidating import default_output
from lora_tool.plan.consolidate.plan_consolidate import What, plan_consolidate
from lora_tool.tensors import DType, float_type


@click.command("consolidate", cls=Timed, epilog="Example: lora-tool consolidate run/checkpoint-500 -o my-adapter/")
@click.argument("checkpoint", type=FolderOrId(), metavar="[CKPT]", default=".")
@click.option(
    "-o", "--output", type=UserPath(), help="Folder to write.  [default: CKPT-adapter, CKPT-model or CKPT-state]"
)
@rank_file_options
@click.option(
    "--what",
    type=ChoiceOf(What),
    default=What.AUTO.value,
    show_default=True,
    help="auto: an adapter if there are LoRA tensors, else a model; state: all tensors under their saved names.",
)
@click.option(
    "--dtype",
    type=Parsed(float_type),
    metavar="[bfloat16|float16|float32]",
    help="Data type of all weights.  [default: as saved]",
)
@ignore_option("Continue despite these findings: LT404,LT41.")
@click.option(
    "--max-shard-size",
    "max_shard_bytes",
    type=Parsed(number_of_bytes),
    metavar="SIZE",
    help="Maximum size of a weights file.  [default: 5GB]",
)
@writing_options(verify=False)
@spread_options
@part_option
@run_options
def command(
    checkpoint: str,
    output: Path | None,
    *,
    what: What,
    tag: str | None,
    adapter_config: Path | None,
    lora_alpha: float | None,
    dtype: DType | None,
    ignore: tuple[str, ...],
    max_shard_bytes: int | None,
    overwrite: bool,
    resume: bool,
    engine: EngineName,
    address: str | None,
    workers: int | None,
    **how: Any,  # the arguments of `carry_out`
) -> None:
    """Reassemble the rank files of a DeepSpeed, FSDP, verl or Megatron checkpoint.

    CKPT is the folder that training wrote (by default this one); it holds global_step… folders or .metadata. Code in
    its pickles is never run.
    """
    spread = spread_over(engine, address, workers)
    opened = open_sharded(checkpoint)
    if output:
        check_output(output, overwrite=overwrite or resume, inputs=(opened.root,))  # before hours of reading
    plan = plan_consolidate(
        opened,
        what=what,
        tag=tag,
        adapter_config=adapter_config,
        lora_alpha=lora_alpha,
        dtype=dtype,
        ignore=ignore,
        max_shard_bytes=max_shard_bytes,
    )
    out = output or default_output(opened, str(plan.manifest["what"]))
    check_output(out, overwrite=overwrite or resume, inputs=(opened.root,))
    carry_out(plan, out, overwrite=overwrite, resume=resume, spread=spread, **how)
