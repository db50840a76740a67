"""`lora-tool merge`: base + adapter → a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lora_tool.cli.command_table import Configured, configured
from lora_tool.cli.configuration import rule_choice
from lora_tool.cli.exit_codes import DONE
from lora_tool.cli.merge_options import asked, merge_options
from lora_tool.cli.options import FolderOrId, config_option
from lora_tool.cli.writing import carry_out, part_option, run_options
from lora_tool.cluster.share import Share
from lora_tool.display import printable
from lora_tool.plan.merge.options import MergeArguments
from lora_tool.weighted import weighted


@click.command("merge", cls=Configured, epilog="Example: lora-tool merge --rm my-adapter/ -o my-reward-model/")
@click.argument("adapters", nargs=-1, type=FolderOrId(), metavar="[ADAPTER[=WEIGHT]]...")
@merge_options(MergeArguments)
@click.option("--each", is_flag=True, help="Merge every adapter on its own, into OUTPUT/NAME.")
@part_option
@config_option
@run_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    adapters: tuple[str, ...],
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    part: Share | None,
    each: bool,
    **typed: Any,  # the declared options, and --config
) -> int:
    """Merge ADAPTER into its base model.

    ADAPTER is a folder (by default this one), or on the Hub owner/name[@revision], hf://owner/name or a page's URL.
    If several are given, their ΔW are summed, each times its weight: A=0.7 B=0.3; with --each, each is merged on its
    own, and one that is refused does not stop the others. The adapter's config decides whether the result is a causal
    LM, a classifier or another class. The output folder appears only when it is complete. Options can be set in the
    [merge] table of lora-tool.toml.
    """
    rules = rule_choice(ctx, configured(ctx))
    options = replace(asked(MergeArguments, typed), **rules.arguments())
    if each:
        _require_each(adapters, options, part)
        from lora_tool.cli.merge_each import carry_out_each  # only where asked for

        return carry_out_each(adapters or (".",), options, dry_run=dry_run, as_json=as_json, quiet=quiet)
    from lora_tool.pipeline.merging import begun, meant_instead, merge_inputs, planned  # after the options

    if len(adapters) > 1 and options.out is None:
        meant = meant_instead(adapters, options.base)
        raise click.UsageError(
            f"give the base model with --base: {meant}"
            if meant
            else "name the output with -o OUT when merging several adapters"
        )
    from lora_tool.execution.folder import check_output

    options.spread.require()
    inputs = merge_inputs(adapters or (".",), options.base)
    for note in inputs.notes:
        _note(f"note: {note}")
    out = Path(options.out) if options.out else inputs.default_output
    check_output(out, overwrite=options.overwrite or options.resume, inputs=inputs.paths)
    ahead = begun(inputs, options.spread) if part is None and not dry_run else nullcontext()
    with ahead, planned(inputs, options, out, dry_run=dry_run, alone=part is None, note=_note) as plan:
        if plan is None:
            click.echo(f"would write {printable(str(out))}, merged by PEFT in memory")
        else:
            carry_out(plan, out, dry_run=dry_run, as_json=as_json, quiet=quiet, part=part, **options.writing())
    return DONE


def _require_each(adapters: Sequence[str], options: MergeArguments, part: Share | None) -> None:
    """Return if the adapters can each be merged on their own. Raises `click.UsageError`."""
    if options.out is None:
        raise click.UsageError("--each needs -o OUT: each adapter gets a folder of its own in it")
    if part is not None:
        raise click.UsageError("--part is a share of one output, and --each writes several: leave out one of them")
    heavy = next((each for each in adapters if weighted(each)[0] is not each), None)
    if heavy is not None:
        raise click.UsageError(f"{heavy} has a weight in a sum, but --each merges every adapter on its own")


def _note(text: str) -> None:
    click.echo(printable(text), err=True)
