"""`lora-tool merge`: base + adapter → a model folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lora_tool.cli.command_table import Configured, configured
from lora_tool.cli.configuration import rule_choice
from lora_tool.cli.options import FolderOrId, config_option
from lora_tool.cli.writing import asked, carry_out, merge_options, part_option, run_options
from lora_tool.cluster.share import Share
from lora_tool.display import printable
from lora_tool.plan.merge.options import MergeArguments


@click.command("merge", cls=Configured, epilog="Example: lora-tool merge --rm my-adapter/ -o my-reward-model/")
@click.argument("adapters", nargs=-1, type=FolderOrId(), metavar="[ADAPTER[=WEIGHT]]...")
@merge_options(MergeArguments)
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
    **typed: Any,  # noqa: ANN401 - the declared options, and --config
) -> None:
    """Merge ADAPTER into its base model.

    ADAPTER is a folder (by default this one), or on the Hub owner/name[@revision], hf://owner/name or a page's URL.
    If several are given, their ΔW are summed, each times its weight: A=0.7 B=0.3. The adapter's config decides whether
    the result is a causal LM, a classifier or another class. The output folder appears only when it is complete.
    Options can be set in the [merge] table of lora-tool.toml.
    """
    rules = rule_choice(ctx, configured(ctx))
    options = replace(asked(MergeArguments, typed), **rules.arguments())
    from lora_tool.pipeline.merging import meant_instead, merge_inputs, planned  # noqa: PLC0415 - after the options

    if len(adapters) > 1 and options.out is None:
        meant = meant_instead(adapters, options.base)
        raise click.UsageError(
            f"give the base model with --base: {meant}"
            if meant
            else "name the output with -o OUT when merging several adapters"
        )
    from lora_tool.execution.folder import check_output  # noqa: PLC0415

    options.spread.require()
    inputs = merge_inputs(adapters or (".",), options.base)
    for source, adapter in zip(inputs.sources, inputs.adapters, strict=True):
        if adapter.root != source.path:
            _note(f"note: merging the adapter in {adapter.root}")
    out = Path(options.out) if options.out else inputs.default_output
    check_output(out, overwrite=options.overwrite, inputs=inputs.paths)
    with planned(inputs, options, out, dry_run=dry_run, alone=part is None, note=_note) as plan:
        if plan is None:
            click.echo(f"would write {printable(str(out))}, merged by PEFT in memory")
            return
        carry_out(plan, out, dry_run=dry_run, as_json=as_json, quiet=quiet, part=part, **options.writing())


def _note(text: str) -> None:
    click.echo(printable(text), err=True)
