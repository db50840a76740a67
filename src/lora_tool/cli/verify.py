"""`lora-tool verify`: whether a merged folder is what its base and adapter give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tool.cli.command_table import Configured, configured
from lora_tool.cli.configuration import rule_choice
from lora_tool.cli.exit_codes import DONE, FAILED_CHECK, FINDINGS
from lora_tool.cli.merge_options import spread_options
from lora_tool.cli.options import (
    FolderOrId,
    UserPath,
    base_option,
    config_option,
    format_option,
    jobs_option,
    json_option,
    pair_options,
    pairs_asked,
    plot_option,
    quiet_option,
    report_option,
    rule_options,
    verbose_option,
)
from lora_tool.cli.reporting import Reporting, report_files, report_text
from lora_tool.cli.terminal import progress_bar, say, wants_colour
from lora_tool.cluster.spread import EngineName, spread_over
from lora_tool.display import printable
from lora_tool.hub_names import ANYWHERE
from lora_tool.report.findings import Severity
from lora_tool.report.forms import Form

if TYPE_CHECKING:
    from lora_tool.sources import Reference
    from lora_tool.verification.verified import Verification


@click.command("verify", cls=Configured, epilog="Example: lora-tool verify my-reward-model/")
@click.argument("merged", nargs=-1, required=True, type=UserPath(), metavar="MERGED...")
@click.option(
    "--adapter",
    "adapters",
    type=FolderOrId(),
    multiple=True,
    metavar="ADAPTER",
    help=f"Adapter that was merged: {ANYWHERE}.  [default: the one in lora_tool.json]",
)
@base_option(f"Base model: {ANYWHERE}.  [default: the one in lora_tool.json, the adapter or config.json]")
@click.option("--sample", is_flag=True, help="Compare samples of every tensor instead of every value.")
@click.option("--logits", is_flag=True, help="Also run both models and compare their answers.")
@click.option(
    "--prompts",
    type=UserPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="Prompts for --logits: one per line, or .jsonl.  [default: eight short ones]",
)
@pair_options
@plot_option("Draw the margins of --pairs")
@click.option("--tensors", is_flag=True, help="Print a line for each tensor.")
@rule_options
@click.option("--strict", is_flag=True, help="Also fail on warnings and on what could not be checked.")
@jobs_option
@spread_options
@format_option
@report_option
@config_option
@json_option
@quiet_option("Print nothing unless there are findings.")
@verbose_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    merged: tuple[Path, ...],
    *,
    adapters: tuple[str, ...],
    base: str | None,
    sample: bool,
    prompts: Path | None,
    pairs: Path | None,
    min_accuracy: float | None,
    plot: Path | None,
    tensors: bool,
    fail_on: str,  # noqa: ARG001 - the configuration may have another
    config_file: Path | None,  # noqa: ARG001 - read before
    strict: bool,
    form: str,
    reports: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    engine: EngineName,
    address: str | None,
    workers: int | None,
    **asked: Any,  # arguments of `verify`: select, ignore, logits and jobs
) -> int:
    """Compare the model folder MERGED with its base and adapter, whichever tool merged it.

    Every tensor is checked: one that the adapter does not change must have the base's bytes, any other must be W + ΔW,
    computed again. An adapter that `combine`, `resize`, `prepare`, `extract` or `convert` wrote is compared with what
    it was made from. Several folders are verified one after the other, with a table at the end. The exit code is 5 if a
    tensor is wrong, and 1 if only --min-accuracy is missed. Options can be set in the [verify] table of lora-tool.toml.
    """
    from lora_tool.checkpoint import open_model
    from lora_tool.plan.merge.provenance import find_inputs
    from lora_tool.verification.checking import Level  # after the usage is known to be right
    from lora_tool.verification.verifying import verify_inputs, written_wrong

    rules = rule_choice(ctx, configured(ctx))
    spread = spread_over(engine, address, workers)
    asked |= {"select": rules.select, "ignore": rules.ignore}
    printed = Form.JSON if as_json else Form(form)
    told = Reporting(form=printed, files=report_files(reports), fail_on=rules.fail_on, strict=strict)
    asked["prompts"] = _prompts_in(prompts, logits=asked["logits"])
    asked["pairs"] = pairs_asked(pairs, min_accuracy)
    _require_drawable(plot, pairs)
    watch = partial(progress_bar, quiet=quiet or printed is Form.JSON)
    level = Level.SAMPLE if sample else Level.FULL
    given = _opened_once(base, merged)
    open_base = cache(open_model)

    def verified(folder: Path) -> Verification:
        computed = _of_computed(folder, adapters, given, asked, level=level, watch=watch)
        if computed is not None:
            return computed
        inputs = find_inputs(folder, base=given, adapters=adapters, open_base=open_base)
        return verify_inputs(inputs, level=level, watch=watch, spread=spread, **asked)

    def code_of(verification: Verification) -> int:
        if not told.fails(verification.report):
            return DONE
        failing = verification.report.at_least(told.least)
        return FINDINGS if failing and not written_wrong(failing) else FAILED_CHECK

    if len(merged) > 1:
        _require_for_several(adapters, plot, tensors=tensors)
        from lora_tool.cli.verify_several import verify_several  # only for several

        return verify_several(merged, verified, code_of, told, quiet=quiet)
    [folder] = merged
    verification = verified(folder)
    if verification.report.findings or not quiet:
        shown = _text(verification, printed, told.least, tensors=tensors, color=wants_colour())
        (say if printed is Form.TEXT else click.echo)(shown)
    if plot is not None and verification.pairs is not None:
        from lora_tool.pictures.margins import draw_margins  # matplotlib, only for pictures

        draw_margins(folder.resolve().name, verification.pairs, plot)
        click.echo(f"drawn: {printable(str(plot))}", err=True)
    told.write_files(lambda form: _text(verification, form, told.least, tensors=tensors))
    return code_of(verification)


def _prompts_in(file: Path | None, *, logits: bool) -> Sequence[str] | None:
    """Return the prompts of the file, None without one. Raises `click.UsageError`."""
    if file is None:
        return None
    if not logits:
        raise click.UsageError("--prompts needs --logits")
    from lora_tool.verification.prompts import read_prompts  # torch, only where asked for

    return read_prompts(file)


def _opened_once(base: str | None, folders: Sequence[Path]) -> Reference | None:
    """Return the base that was given, opened where several folders are compared with it."""
    if base is None or len(folders) == 1:
        return base
    from lora_tool.sources import opened_model  # for several

    return opened_model(base)


def _require_for_several(adapters: Sequence[str], plot: Path | None, *, tensors: bool) -> None:
    """Return if the options can be those of several folders. Raises `click.UsageError`."""
    for name, given in (("--adapter", adapters), ("--plot", plot), ("--tensors", tensors)):
        if given:
            raise click.UsageError(f"{name} is about one folder: verify that by itself")


def _of_computed(
    folder: Path,
    adapters: tuple[str, ...],
    base: Reference | None,
    asked: dict[str, Any],
    **how: Any,  # level and watch
) -> Verification | None:
    """Return the verification of an adapter that was computed, None for anything else. Raises `click.UsageError`."""
    from lora_tool.plan.computed import find_computed
    from lora_tool.verification.verifying import verify_computed

    computed = find_computed(folder, adapters, base=base)
    if computed is None:
        return None
    of_models = [name for name in ("logits", "pairs") if asked.get(name)]
    if of_models:
        raise click.UsageError(f"--{of_models[0]} is for merged models, but {folder} is an adapter")
    return verify_computed(computed, **{name: asked[name] for name in ("select", "ignore", "jobs")}, **how)


def _require_drawable(plot: Path | None, pairs: Path | None) -> None:
    """Raise `click.UsageError` if the plot cannot be drawn; nothing to draw is fine."""
    if plot is None:
        return
    if pairs is None:
        raise click.UsageError("--plot draws the margins of --pairs, so it needs --pairs")
    if not plot.parent.is_dir():
        raise click.BadParameter(f"{plot.parent} is not a folder", param_hint="--plot")


def _text(verification: Verification, form: Form, fail_on: Severity, *, tensors: bool, color: bool = False) -> str:
    from lora_tool.verification.text import verification_json, verification_lines

    if form is Form.JSON:
        return json.dumps(verification_json(verification), indent=2, allow_nan=False)
    text = report_text(verification.report, form, fail_on, color=color)
    return "\n".join((*verification_lines(verification, tensors=tensors), text)) if form is Form.TEXT else text
