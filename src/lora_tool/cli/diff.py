"""`lora-tool diff`: what changed from one adapter to another, or from one model to another."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lora_tool.cli.exit_codes import DONE, FINDINGS
from lora_tool.cli.options import FolderOrId, json_option, plot_option, quiet_option, say_drawn
from lora_tool.cli.terminal import print_json, progress_bar


@click.command(
    "diff", epilog="Example: lora-tool diff fixtures/reward-run/checkpoint-2 fixtures/reward-run/checkpoint-4"
)
@click.argument("first", type=FolderOrId())
@click.argument("second", type=FolderOrId())
@click.option("--all", "every", is_flag=True, help="List every module and tensor instead of one line per target.")
@plot_option("Draw how far apart they are, by target and layer")
@click.option("--exit-code", "tell", is_flag=True, help="Exit with 1 if they differ.")
@quiet_option("No progress bar.")
@json_option
def command(*, first: str, second: str, every: bool, plot: Path | None, tell: bool, quiet: bool, as_json: bool) -> int:
    """Compare two adapters, or two models (a base with its merged model, say), module by module. Each is a folder, or
    on the Hub owner/name[@revision], hf://owner/name or the URL of its page.

    Adapters are compared by the ΔW = scaling·B·A of each module, so their ranks may differ. The table shows both norms,
    the norm of the difference (relative to the first), and the cosine of the angle between them.
    """
    from lora_tool.workflows.diff import diff  # after the usage is known to be right

    comparison = diff(first, second, watch=lambda what, total: progress_bar(what, total, quiet=quiet or as_json))
    if plot is not None:
        from lora_tool.workflows.drawing import drawer

        drawer().comparison(comparison, plot, names=(first, second))
        say_drawn(plot)
    if as_json:
        print_json(first=first, second=second, **comparison.to_json())
    else:
        from lora_tool.cli.diff_view import show_comparison  # rich, only for people

        show_comparison(comparison, sys.stdout, every=every)
    return FINDINGS if tell and not comparison.same else DONE
