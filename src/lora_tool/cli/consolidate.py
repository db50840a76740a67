"""`lora-tool consolidate`: rank files of a training run → an adapter, a model or a state dict."""

from __future__ import annotations

from pathlib import Path

import click

from lora_tool.checkpoint import DcpDir, ZeroDir, open_sharded
from lora_tool.cli.merge import _DTYPES, SizeType, _check_output, _execute, _print_plan, _print_result
from lora_tool.cli.options import ListType
from lora_tool.display import printable
from lora_tool.plan.consolidate import What, plan_consolidate


@click.command("consolidate", epilog="Example: lora-tool consolidate run/checkpoint-500 -o my-adapter/")
@click.argument("checkpoint", metavar="CKPT", default=".")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
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
    type=click.Path(exists=True, path_type=Path),
    help="adapter_config.json.  [default: beside CKPT]",
)
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Type of all weights.  [default: each as saved]")
@click.option("--max-shard-size", type=SizeType(), help="Largest weights file.  [default: 5GB]")
@click.option(
    "--ignore", type=ListType(), multiple=True, metavar="CODES", help="Go on in spite of these faults: LT404,LT41."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Workers.  [default: one per core]")
@click.option("--overwrite", is_flag=True, help="Replace an output folder that lora-tool wrote, after success.")
@click.option("--dry-run", is_flag=True, help="Print the plan, read no weights and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar and no summary.")
def command(
    checkpoint: str,
    output: Path | None,
    tag: str | None,
    what: str,
    adapter_config: Path | None,
    dtype: str | None,
    max_shard_size: int | None,
    ignore: tuple[tuple[str, ...], ...],
    jobs: int | None,
    overwrite: bool,  # noqa: FBT001 - click passes flags by name
    dry_run: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    quiet: bool,  # noqa: FBT001
) -> None:
    """Put the rank files of a DeepSpeed or FSDP2 checkpoint together.

    CKPT is the folder that the training wrote: with global_step… folders, or with .metadata. No code in it is run.
    """
    opened = open_sharded(checkpoint)
    plan = plan_consolidate(
        opened,
        what=what,
        tag=tag,
        adapter_config=adapter_config,
        dtype=_DTYPES[dtype] if dtype else None,
        max_shard_bytes=max_shard_size,
        ignore=[code for codes in ignore for code in codes],
        check_values=not dry_run,
    )
    out = output or _default_output(opened, str(plan.manifest["what"]))
    _check_output(out, overwrite=overwrite, inputs=(opened.root,))
    for warning in plan.warnings:
        click.echo(f"{click.style('warning:', fg='yellow')} {printable(warning)}", err=True)
    if dry_run:
        _print_plan(plan, out, as_json=as_json)
        return
    _execute(plan, out, jobs=jobs, overwrite=overwrite, show=not (quiet or as_json))
    _print_result(plan, out, as_json=as_json, quiet=quiet)


def _default_output(opened: ZeroDir | DcpDir, what: str) -> Path:
    folder = opened.root.resolve()
    return folder.parent / f"{folder.name}-{what}"
