"""`lora-tool prune`: remove the checkpoints of runs that are neither the last nor the best."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lora_tool.cli.options import UserPath, json_option
from lora_tool.cli.terminal import print_json
from lora_tool.display import printable


@click.command("prune", epilog="Example: lora-tool prune fixtures/reward-run --keep-last 1 --keep-best 1")
@click.argument("root", default=".", type=UserPath())
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Number of last complete checkpoints to keep per run.",
)
@click.option(
    "--keep-best",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Number of best checkpoints to keep per run; the best one always stays.",
)
@click.option("--apply", "apply_", is_flag=True, help="Remove them. Without --apply nothing is touched.")
@click.option(
    "--trash",
    type=UserPath(file_okay=False),
    metavar="DIR",
    help="With --apply: move them to this folder instead.",
)
@json_option
def command(*, root: Path, keep_last: int, keep_best: int, apply_: bool, trash: Path | None, as_json: bool) -> None:
    """Show which checkpoints of the runs under ROOT (by default this folder) can go; --apply removes them.

    Every run keeps its last complete and its best checkpoints, the newest from which training can go on, the one that
    DeepSpeed's, verl's or Megatron's pointer names, all that are newer than the last complete one, and everything if
    none is complete. A checkpoint is complete if all of it was saved, and `validate` finds no error in it with the same
    lora-tool.toml. Finished weights, adapters and models are never touched, nor are links and their targets.
    """
    from lora_tool.cli.configuration import configuration
    from lora_tool.execution.folder import remove, require_room
    from lora_tool.inventory import choose, inventory

    if trash is not None and not apply_:
        raise click.UsageError("--trash needs --apply: nothing is moved without it")
    listed = inventory(root, configuration(None, [str(root)]).criteria)
    choices = [
        choice
        for choice in choose(listed, keep_last=keep_last, keep_best=keep_best)
        if trash is None or not choice.checkpoint.root.resolve().is_relative_to(trash.resolve())
    ]
    # runs have folders of the same names: in the trash each keeps its place below ROOT
    going = [choice.checkpoint.root for choice in choices if choice.goes and apply_]
    places = {folder: trash / folder.parent.relative_to(root) for folder in going if trash is not None}
    for folder, place in places.items():
        require_room(folder, place)
    for folder in going:
        remove(folder, trash=places.get(folder))
        click.echo(f"{'moved' if places else 'removed'} {printable(str(folder))}", err=True)
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
        print_json(applied=apply_, checkpoints=rows)
        return
    from lora_tool.cli.inventory_view import show_choices  # rich, only for people

    show_choices(choices, root, sys.stdout, done=apply_)
