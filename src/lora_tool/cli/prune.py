"""`lora-tool prune`: remove the checkpoints of runs that are neither the last nor the best."""

from __future__ import annotations

import sys
from typing import Any

import click

from lora_tool.cli.options import FolderOrId, json_option, options_of, typed_as
from lora_tool.cli.terminal import print_json, progress_bar
from lora_tool.core.display import printable
from lora_tool.formats.files import expanded
from lora_tool.workflows.prune import PruneOptions, prune


@click.command("prune", epilog="Example: lora-tool prune fixtures/reward-run --keep-last 1 --keep-best 1")
@click.argument("root", default=".", type=FolderOrId())
@options_of(PruneOptions)
@json_option
def command(root: str, *, as_json: bool, **typed: Any) -> None:
    """Show which checkpoints of the runs under ROOT (by default this folder) can go; --apply removes them.

    Every run keeps its last complete and its best checkpoints, the newest from which training can go on, the one that
    a pointer of DeepSpeed, verl or another framework names, all that are newer than the last complete one unless only
    the values of their weights are wrong (NaN), and everything if none is complete. A checkpoint is complete if all of
    it was saved, and `validate` finds no error in it with the same lora-tool.toml. Finished weights, adapters and models
    are never touched, nor are links and their targets.
    """
    from lora_tool.cli.configuration import configuration

    options = typed_as(PruneOptions, typed)
    done = "removed" if options.trash is None else "moved"
    choices = prune(
        root,
        options,
        configuration(None, [root]).criteria,
        gone=lambda folder: click.echo(f"{done} {printable(str(folder))}", err=True),
        progress=progress_bar,
    )
    if as_json:
        rows = [
            {
                "path": str(choice.checkpoint.root),
                "goes": choice.goes,
                "why": str(choice.why),
                "incomplete": choice.checkpoint.row.incomplete,
                "unresumable": choice.checkpoint.row.unresumable,
                "step": choice.checkpoint.row.step,
                "nbytes": choice.checkpoint.row.nbytes,
                "verdict": choice.checkpoint.row.verdict,
            }
            for choice in choices
        ]
        print_json(applied=options.apply, checkpoints=rows)
        return
    from lora_tool.cli.inventory_view import show_choices  # rich, only for people

    show_choices(choices, expanded(root), sys.stdout, done=options.apply)
