"""`lora-tool merge`: base + adapter → a model folder."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.configuration import Configured, configured, rule_choice
from lora_tool.cli.exit_codes import DONE
from lora_tool.cli.options import FolderOrId, config_option, option_in, options_of, reward_option, typed_as, typed_task
from lora_tool.cli.writing import caller, part_option, run_options
from lora_tool.core.options import Section
from lora_tool.plans.merge.options import MergeArguments


@click.command("merge", cls=Configured, epilog="Example: lora-tool merge --rm my-adapter/ -o my-reward-model/")
@click.argument("adapters", nargs=-1, type=FolderOrId(), metavar="[ADAPTER[=WEIGHT]]...")
@options_of(MergeArguments)
@reward_option
@option_in(Section.INPUT, "--each", is_flag=True, help="Merge every adapter on its own, into OUTPUT/NAME.")
@part_option
@config_option
@run_options
@click.pass_context
def command(ctx: click.Context, /, adapters: tuple[str, ...], *, each: bool, **typed: Any) -> int:
    """Merge ADAPTER into its base model.

    ADAPTER is a folder (by default this one), or on the Hub owner/name[@revision], hf://owner/name or a page's URL.
    If several are given, their ΔW are summed, each times its weight: A=0.7 B=0.3; with --each, each is merged on its
    own, and one that is refused does not stop the others. The adapter's config decides whether the result is a causal
    LM, a classifier or another class. The output folder appears only when it is complete. Options can be set in the
    [merge] table of lora-tool.toml.
    """
    rules = rule_choice(ctx, configured(ctx))
    options = typed_as(MergeArguments, typed, **typed_task(typed), **rules.arguments())
    if each:
        from lora_tool.cli.merge_each import show_each  # for several

        return show_each(adapters or (".",), options, typed)
    from lora_tool.workflows.merge import merge  # after the usage is known to be right

    merge(adapters or (".",), options, caller(typed))
    return DONE
