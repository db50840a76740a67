"""`lora-tool ls`: all checkpoints under a folder."""

from __future__ import annotations

import sys

import click

from lora_tool.cli.options import FolderOrId, json_option
from lora_tool.cli.terminal import print_json


@click.command("ls", epilog="Example: lora-tool ls fixtures/reward-run")
@click.argument("root", default=".", type=FolderOrId())
@json_option
def command(root: str, *, as_json: bool) -> None:
    """List every checkpoint under ROOT (by default this folder; or an adapter on the Hub): step, metric, sizes by kind, verdict.

    The verdict is that of `validate` with the same lora-tool.toml. A star marks the best complete checkpoint of a run.
    """
    from lora_tool.cli.configuration import configuration
    from lora_tool.workflows.ls import ls

    listing = ls(root, criteria=configuration(None, [root]).criteria)
    if as_json:
        print_json(**listing.to_json())
        return
    from lora_tool.cli.inventory_view import show_inventory  # rich, only for people

    show_inventory(listing, sys.stdout)
