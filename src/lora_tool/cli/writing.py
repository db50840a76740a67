"""What the commands that write a folder share: their options, and how a plan and what was written are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from lora_tool.cli.options import Parsed, in_order, option_in, quiet_option, verbose_option
from lora_tool.cli.terminal import as_typed, progress_bar, say, show_findings, wants_colour, warn
from lora_tool.core.display import json_text, printable
from lora_tool.core.options import Section
from lora_tool.core.share import share
from lora_tool.workflows.caller import Caller, Done
from lora_tool.workflows.written import Planned, Written, intent

if TYPE_CHECKING:
    from lora_tool.execution.attempts import ShareWritten
    from lora_tool.plans.core.plan import Plan

_PLAN_LEVELS = 4
"""The plan, its shards, a shard, its steps: a step is a line."""

run_options = in_order(
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    option_in(Section.PRINTED, "--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON."),
    quiet_option("No progress bar and no summary."),
    verbose_option,
)
"""How one run of a command that writes weights is shown: what `caller` reads."""

part_option = option_in(
    Section.WORKERS,
    "--part",
    type=Parsed(share),
    metavar="I/N",
    help="Write only part I of N of the files, such as 3/8, as one job of an array. --resume then finishes the folder.",
)


def caller(typed: Mapping[str, Any]) -> Caller:
    """Return the caller of a use case that writes, as `run_options` and `part_option` were `typed`.

    Findings go to stderr, plans and results to stdout.
    """
    dry_run, part, as_json, quiet = typed["dry_run"], typed.get("part"), typed["as_json"], typed["quiet"]
    silent = quiet or as_json
    shown = _Shown(silent=silent or dry_run or part is not None, as_json=as_json, quiet=quiet)
    return Caller(
        dry_run=dry_run,
        part=part,
        progress=partial(progress_bar, quiet=silent),
        note=lambda text: click.echo(f"note: {printable(as_typed(text))}", err=True),
        planned=shown.planned,
        findings=show_findings,
        done=shown.done,
        own_process=True,
    )


class _Shown:
    """Prints plans and results."""

    def __init__(self, *, silent: bool, as_json: bool, quiet: bool) -> None:
        self.silent = silent
        self.as_json = as_json
        self.quiet = quiet

    def planned(self, plan: Plan) -> None:
        """Show what was found in the inputs, and what is about to be written."""
        show_findings(plan.findings)
        for warning in plan.warnings:
            warn(warning)
        if not self.silent:
            say(_weighed(intent(plan)))
            sys.stdout.flush()  # before the long work, in a log too

    def done(self, done: Done) -> None:
        """Show a result, the plan of a dry run whole."""
        if isinstance(done, Planned):
            _show_plan(done, as_json=self.as_json)
            return
        if isinstance(done, Written):
            said = {*done.plan.warnings, *map(str, done.plan.findings)}
            for late in done.warnings:
                if late not in said:
                    warn(late)
        if self.as_json:
            click.echo(json.dumps(done.to_json(), indent=2))
        elif not self.quiet:
            say(_weighed(done.result(), done.verdict) if isinstance(done, Written) else _part(done))


def _show_plan(planned: Planned, *, as_json: bool) -> None:
    if planned.plan is None:
        click.echo(f"would write {printable(str(planned.path))}, merged by PEFT in memory")
    elif as_json:
        click.echo(json_text({"output": str(planned.path), **planned.plan.to_json()}, spread=_PLAN_LEVELS))
    else:
        say(f"would write {printable(str(planned.path))}\n{planned.plan}")


def _part(done: ShareWritten) -> str:
    return f"{done}\nnext: when all parts have ended, run the same command with --resume instead of --part"


def _weighed(lines: Iterable[str], verdict: str = "") -> str:
    """Return the lines as one text: on a terminal the verdict stands out, and what is copied along stands back."""
    if not wants_colour():
        return "\n".join(lines)
    styled = (
        click.style(line, fg="green", bold=True)
        if line == verdict
        else click.style(line, dim=True)
        if line.startswith(" ")
        else line
        for line in lines
    )
    return "\n".join(styled)
