"""`lora-tool consolidate`: rank files of a training run → an adapter, a model or a state dict."""

from __future__ import annotations

from pathlib import Path

import click

from lora_tool.checkpoint import ShardedDir, open_sharded
from lora_tool.cli.options import UserPath, ignore_option, require_rules
from lora_tool.cli.writing import DTYPES, carry_out, dtype_option, writing_options
from lora_tool.execution.folder import check_output
from lora_tool.plan.consolidate.plan_consolidate import What, prepare_consolidate


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
    type=click.Choice([what.value for what in What]),
    default=What.AUTO.value,
    show_default=True,
    help="auto is adapter where there are LoRA tensors, else model; state keeps names as saved.",
)
@click.option(
    "--adapter-config",
    type=UserPath(exists=True),
    help="adapter_config.json.  [default: beside CKPT]",
)
@dtype_option("each as saved")
@ignore_option("Go on in spite of these faults: LT404,LT41.")
@writing_options("5GB", verify=False)
def command(
    checkpoint: str,
    output: Path | None,
    tag: str | None,
    what: str,
    adapter_config: Path | None,
    dtype: str | None,
    max_shard_size: int | None,
    ignore: tuple[str, ...],
    jobs: int | None,
    verify: bool,  # noqa: FBT001
    overwrite: bool,  # noqa: FBT001 - click passes flags by name
    resume: bool,  # noqa: FBT001
    dry_run: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    quiet: bool,  # noqa: FBT001
) -> None:
    """Put the rank files of a DeepSpeed or FSDP2 checkpoint together.

    CKPT is the folder that the training wrote: with global_step… folders, or with .metadata. No code in it is run.
    """
    require_rules(ignore)
    opened = open_sharded(checkpoint)
    if output:
        check_output(output, overwrite=overwrite, inputs=(opened.root,))  # before hours of reading
    plan, values = prepare_consolidate(
        opened,
        what=what,
        tag=tag,
        adapter_config=adapter_config,
        dtype=DTYPES[dtype] if dtype else None,
        max_shard_bytes=max_shard_size,
        ignore=ignore,
    )
    carry_out(
        plan,
        output or _default_output(opened, str(plan.manifest["what"])),
        inputs=(opened.root,),
        jobs=jobs,
        overwrite=overwrite,
        resume=resume,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
        verify=verify,
        values=values,
    )


def _default_output(opened: ShardedDir, what: str) -> Path:
    folder = opened.root.resolve()
    return folder.parent / f"{folder.name}-{what}"
