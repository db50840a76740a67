"""`lora-tool verify`: whether a merged folder is what its base and adapter give."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tool.cli.configuration import Configured, configured, rule_choice
from lora_tool.cli.options import (
    FolderOrId,
    config_option,
    fail_on_option,
    format_option,
    json_option,
    option_in,
    options_of,
    plot_option,
    quiet_option,
    report_option,
    say_drawn,
    typed_as,
    verbose_option,
)
from lora_tool.cli.reporting import Reporting, report_files, report_text
from lora_tool.cli.terminal import progress_bar, say, wants_colour
from lora_tool.core.display import printable
from lora_tool.core.options import Section
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form
from lora_tool.verification.levels import Level
from lora_tool.workflows.caller import Caller
from lora_tool.workflows.verify import VerifyOptions, verify

if TYPE_CHECKING:
    from lora_tool.verification.verified import Verification


@click.command("verify", cls=Configured, epilog="Example: lora-tool verify my-reward-model/")
@click.argument("merged", nargs=-1, type=FolderOrId(), metavar="[MERGED]...")
@options_of(VerifyOptions)
@option_in(Section.CHECKS, "--sample", is_flag=True, help="Compare samples of every tensor instead of every value.")
@plot_option("Draw the margins of --pairs")
@option_in(Section.PRINTED, "--tensors", is_flag=True, help="Print a line for each tensor.")
@fail_on_option
@option_in(Section.CHECKS, "--strict", is_flag=True, help="Also fail on warnings and on what could not be checked.")
@format_option
@report_option
@config_option
@json_option
@quiet_option("Print nothing unless there are findings.")
@verbose_option
@click.pass_context
def command(
    ctx: click.Context, /, merged: tuple[str, ...], *, plot: Path | None, tensors: bool, quiet: bool, **typed: Any
) -> int:
    """Compare the model MERGED (by default this folder; or on the Hub) with its base and adapter, whoever merged it.

    Every tensor is checked: one that the adapter does not change must have the base's bytes, any other must be W + ΔW,
    computed again. An adapter that `combine`, `resize`, `prepare`, `extract` or `convert` wrote is compared with what
    it was made from; with --served, a running server is asked whether it applies it. Several folders are verified one
    after the other, with a table at the end. The exit code is 5 if a tensor is wrong, or the base is served, and 1 if
    only --min-accuracy is missed. Options can be set in the [verify] table of lora-tool.toml.
    """
    rules = rule_choice(ctx, configured(ctx))
    level = Level.SAMPLE if typed["sample"] else Level.FULL
    options = typed_as(VerifyOptions, typed, level=level, select=rules.select, ignore=rules.ignore)
    form = Form.JSON if typed["as_json"] else Form(typed["form"])
    reporting = Reporting(
        form=form, files=report_files(typed["reports"]), fail_on=rules.fail_on, strict=typed["strict"]
    )
    caller = Caller(progress=partial(progress_bar, quiet=quiet or form is Form.JSON))
    _require_drawable(plot, typed["pairs"])
    merged = merged or (".",)
    if len(merged) > 1:
        for name, given in (("--plot", plot), ("--tensors", tensors)):
            if given:
                raise click.UsageError(f"{name} applies to one folder; verify it separately")
        from lora_tool.cli.verify_several import show_each  # for several

        return show_each(merged, options, caller, reporting, quiet=quiet)
    [folder] = merged
    verification = verify(folder, options, caller)
    if verification.report.findings or not quiet:
        shown = _text(verification, form, reporting.least, tensors=tensors, color=wants_colour())
        (say if form is Form.TEXT else click.echo)(shown)
        sound = not verification.report.at_least(Severity.WARNING)
        if form is Form.TEXT and sound and verification.served is None:
            click.echo(f"next: lora-tool push {printable(shlex.quote(folder))} OWNER/NAME")
    if plot is not None and verification.pairs is not None:
        from lora_tool.workflows.drawing import drawer

        drawer().margins(Path(folder).resolve().name, verification.pairs, plot)
        say_drawn(plot)
    reporting.write_files(lambda form: _text(verification, form, reporting.least, tensors=tensors))
    return reporting.code_of(verification)


def _require_drawable(plot: Path | None, pairs: Path | None) -> None:
    """Raise `click.UsageError` if the plot cannot be drawn; nothing to draw is fine."""
    if plot is None:
        return
    if pairs is None:
        raise click.UsageError("--plot draws the margins of --pairs, so it needs --pairs")
    if not plot.parent.is_dir():
        raise click.BadParameter(f"{plot.parent} is not a folder", param_hint="--plot")


def _text(verification: Verification, form: Form, fail_on: Severity, *, tensors: bool, color: bool = False) -> str:
    from lora_tool.verification.verified import verification_lines

    if form is Form.JSON:
        return json.dumps(verification.to_json(), indent=2, allow_nan=False)
    text = report_text(verification.report, form, fail_on, color=color)
    return "\n".join((*verification_lines(verification, tensors=tensors), text)) if form is Form.TEXT else text
