"""`lora-tool train`: TRL's training, with guards."""

from __future__ import annotations

from pathlib import Path

import click

from lora_tool.cli.options import UserPath, json_option, quiet_option
from lora_tool.train.methods import METHODS


@click.command(
    "train",
    epilog="Example: lora-tool train reward --config run.yaml --learning_rate 1e-4 --dry-run",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("method", type=click.Choice(list(METHODS)), metavar="METHOD")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[TRL OPTION]...")
@click.option("--config", type=UserPath(), help="TRL's YAML; its block `lora_tool:` is read by lora-tool.")
@click.option(
    "--dry-run",
    is_flag=False,
    flag_value="full",
    type=click.Choice(["full", "static"]),
    help="Check everything but take no training step; `static`: check only the options, and print them.",
)
@click.option("--resume", metavar="auto|PATH", help="Resume from the last complete checkpoint, or from this one.")
@json_option
@quiet_option("No summary.")
def command(
    method: str,
    options: tuple[str, ...],
    *,
    config: Path | None,
    dry_run: str | None,
    resume: str | None,
    as_json: bool,
    quiet: bool,
) -> int | None:
    """Train with TRL; stop runs that are bound to fail.

    METHOD is reward, sft, dpo, kto, grpo, rloo, cpo or orpo. Every option of TRL's config classes and of
    `accelerate launch` may be given, in the YAML or as --name value. Needs lora-tool[train].
    """
    from lora_tool.cli.training import train  # after the usage is known to be right

    return train(METHODS[method], options, config, dry_run=dry_run, resume=resume, as_json=as_json, quiet=quiet)
