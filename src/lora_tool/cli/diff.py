"""`lora-tool diff`: what changed from one adapter to another, or from one model to another."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, open_checkpoint, require_whole, unexpected
from lora_tool.cli.exit_codes import DONE, FINDINGS
from lora_tool.cli.options import json_option, quiet_option
from lora_tool.cli.progress import progress_bar
from lora_tool.display import json_data
from lora_tool.errors import NotACheckpoint
from lora_tool.sources import Wanted, resolve


@click.command(
    "diff", epilog="Example: lora-tool diff fixtures/reward-run/checkpoint-2 fixtures/reward-run/checkpoint-4"
)
@click.argument("first")
@click.argument("second")
@click.option("--all", "every", is_flag=True, help="List every module and tensor, not one line a target.")
@click.option("--exit-code", "tell", is_flag=True, help="Exit with 1 if they differ.")
@quiet_option("No progress bar.")
@json_option
def command(*, first: str, second: str, every: bool, tell: bool, quiet: bool, as_json: bool) -> int:
    """Compare two adapters, or two models (a base with its merged model, say), module by module.

    Adapters are compared by what they do: the ΔW = scaling·B·A of each module, whatever its factors and rank. Shown
    are norms, the norm of the difference (relative to the first), and the cosine of the angle between them.
    """
    pair = _open(first), _open(second)
    nbytes = sum(checkpoint.weights.nbytes for checkpoint in pair)
    from lora_tool.inspection.comparison import compare_adapters, compare_models  # noqa: PLC0415 - numpy

    with progress_bar("comparing", nbytes, quiet=quiet or as_json) as progress:
        if isinstance(pair[0], AdapterDir) and isinstance(pair[1], AdapterDir):
            comparison = compare_adapters(pair[0], pair[1], progress)
        elif isinstance(pair[0], ModelDir) and isinstance(pair[1], ModelDir):
            comparison = compare_models(pair[0], pair[1], progress)
        else:
            raise NotACheckpoint(
                f"{first} is {pair[0].kind.with_article}, {second} is {pair[1].kind.with_article}: only like things can be compared",
                hint="compare two adapters or two models; merge the adapter first: lora-tool merge ADAPTER",
            )
    if as_json:
        table = {"schema_version": 1, "first": first, "second": second, "same": comparison.same}
        click.echo(json.dumps(json_data({**table, **dataclasses.asdict(comparison)}), indent=2))
    else:
        from lora_tool.cli.diff_view import show  # noqa: PLC0415 - rich, only for people

        show(comparison, sys.stdout, every=every)
    return FINDINGS if tell and not comparison.same else DONE


def _open(reference: str) -> AdapterDir | ModelDir:
    checkpoint: Checkpoint = open_checkpoint(resolve(reference, download=True, wanted=Wanted.ADAPTER).path)
    if not isinstance(checkpoint, AdapterDir | ModelDir):
        raise unexpected(checkpoint, "an adapter or a model")
    require_whole(checkpoint)
    return checkpoint
