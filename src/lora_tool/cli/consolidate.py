"""`lora-tool consolidate`: rank files of a training run → an adapter, a model or a state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.checkpoint import open_sharded
from lora_tool.cli.options import UserPath, ignore_option, jobs_option, overwrite_option, require_rules
from lora_tool.cli.terminal import show_findings, warn
from lora_tool.cli.writing import Parsed, Word, run_options, show_plan, show_written, size_option, written
from lora_tool.execution.folder import check_output
from lora_tool.pipeline.consolidating import default_output
from lora_tool.plan.consolidate.plan_consolidate import What, plan_consolidate
from lora_tool.tensors import float_type


@click.command("consolidate", epilog="Example: lora-tool consolidate run/checkpoint-500 -o my-adapter/")
@click.argument("checkpoint", metavar="CKPT", default=".")
@click.option(
    "-o",
    "--output",
    type=UserPath(),
    help="Folder to write.  [default: CKPT-adapter, CKPT-model or CKPT-state]",
)
@click.option("--tag", help="Which saved step, such as global_step500.  [default: what the file `latest` names]")
@click.option(
    "--what",
    type=Word(What),
    default=What.AUTO.value,
    show_default=True,
    help="auto is adapter where there are LoRA tensors, else model; state keeps names as saved.",
)
@click.option(
    "--adapter-config",
    type=UserPath(exists=True),
    help="adapter_config.json.  [default: beside CKPT]",
)
@click.option(
    "--dtype",
    type=Parsed(float_type),
    metavar="[bfloat16|float16|float32]",
    help="Type of all weights.  [default: each as saved]",
)
@ignore_option("Go on in spite of these faults: LT404,LT41.")
@size_option("5GB")
@jobs_option
@click.option("--verify/--no-verify", help="Read samples back and check them before publishing.", show_default=True)
@overwrite_option
@click.option("--resume", is_flag=True, help="Take over the finished files of a run that was killed.")
@run_options
def command(
    checkpoint: str,
    output: Path | None,
    *,
    max_shard_size: int | None,
    ignore: tuple[str, ...],
    jobs: int | None,
    verify: bool,
    overwrite: bool,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **asked: Any,  # noqa: ANN401 - what, tag, adapter_config and dtype
) -> None:
    """Put the rank files of a DeepSpeed or FSDP2 checkpoint together.

    CKPT is the folder that the training wrote: with global_step… folders, or with .metadata. No code in it is run.
    """
    require_rules(ignore)
    opened = open_sharded(checkpoint)
    if output:
        check_output(output, overwrite=overwrite, inputs=(opened.root,))  # before hours of reading
    plan = plan_consolidate(opened, max_shard_bytes=max_shard_size, ignore=ignore, **asked)
    out = output or default_output(opened, str(plan.manifest["what"]))
    check_output(out, overwrite=overwrite, inputs=(opened.root,))
    show_findings(plan.findings)
    for warning in plan.warnings:
        warn(warning)
    if dry_run:
        show_plan(plan, out, as_json=as_json)
        return
    done = written(
        plan,
        out,
        verify=verify,
        jobs=jobs,
        overwrite=overwrite,
        resume=resume,
        quiet=quiet or as_json,
    )
    show_written(done, as_json=as_json, quiet=quiet)
