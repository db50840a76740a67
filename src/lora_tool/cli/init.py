"""`lora-tool init`: a run.yaml to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from lora_tool.cli.options import UserPath
from lora_tool.display import printable
from lora_tool.errors import LoraToolError, OutputExists
from lora_tool.train.first_run import first_run
from lora_tool.train.methods import METHODS


@click.command("init", epilog="Example: lora-tool init reward > run.yaml")
@click.argument("method", type=click.Choice(list(METHODS)), metavar="METHOD")
@click.option("--cpu", is_flag=True, help="A short run that needs no GPU.")
@click.option(
    "-o", "--output", type=UserPath(dir_okay=False), help="File to write; it must not exist.  [default: stdout]"
)
def command(method: str, *, cpu: bool, output: Path | None) -> None:
    """Print a commented run.yaml for `lora-tool train METHOD`; it trains without changes.

    METHOD is reward, sft, dpo, kto, grpo, rloo, cpo or orpo. It names a small model and data set on the Hub: put yours
    there.
    """
    text = first_run(METHODS[method], cpu=cpu)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise OutputExists(f"{output} exists", hint="choose another file with -o") from error
    except OSError as error:
        raise LoraToolError(f"{output}: cannot be written: {error.strerror}") from error
    click.echo(
        f"wrote {printable(str(output))}\nnext: lora-tool train {method} --config {printable(shlex.quote(str(output)))} --dry-run"
    )
