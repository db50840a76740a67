"""What the commands that write a folder share: their options, and how a plan and what was written are shown."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_tool.choices import Choice
from lora_tool.cli.options import (
    Decorated,
    in_order,
    jobs_option,
    quiet_option,
    verbose_option,
)
from lora_tool.cli.terminal import progress_bar, say, show_findings, wants_colour, warn
from lora_tool.cluster.share import Share, share
from lora_tool.cluster.spread import Spread
from lora_tool.display import counted, json_text, printable, size
from lora_tool.errors import WrongValue

if TYPE_CHECKING:
    from lora_tool.plan.core.plan import Plan

_PLAN_LEVELS = 4
"""The plan, its shards, a shard, its steps: a step is a line."""


class ChoiceOf(click.Choice):  # type: ignore[type-arg] # generic since click 8.2
    """A word of an enum, in whatever spelling the enum takes."""

    def __init__(self, words: type[Choice]) -> None:
        super().__init__([str(word).replace("_", "-") for word in words])
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's signature
        try:
            return self.words(value)
        except WrongValue:
            return super().convert(value, param, ctx)  # click says which there are


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that a function makes of the text; what it raises is a usage error."""

    name = "value"

    def __init__(self, parse: Callable[[Any], Any]) -> None:
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's signature
        try:
            return self.parse(value)
        except WrongValue as error:
            self.fail(str(error).partition(": ")[2] or str(error), param, ctx)  # click names the option


def writing_options(*, verify: bool) -> Callable[[Decorated], Decorated]:
    """Add how a folder is written; `verify` is whether samples of it are checked unless it is said otherwise."""
    return in_order(
        jobs_option,
        click.option(
            "--verify/--no-verify",
            default=verify,
            help="Read samples back and check them before the output gets its name.",
            show_default=True,
        ),
        click.option(
            "--overwrite", is_flag=True, help="Replace an existing output of lora-tool once the new one is complete."
        ),
        click.option(
            "--resume", is_flag=True, help="Reuse what a killed run finished; leave a finished output as it is."
        ),
    )


run_options = in_order(
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON."),
    quiet_option("No progress bar and no summary."),
    verbose_option,
)
"""How one run of a command that writes weights is shown: the keywords of `carry_out`."""


part_option = click.option(
    "--part",
    type=Parsed(share),
    metavar="I/N",
    help="Write only part I of N of the files, such as 3/8, as one job of an array. --resume then finishes the folder.",
)


def carry_out(
    plan: Plan,
    out: Path,
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    part: Share | None = None,
    **how: Any,  # the arguments of `write`
) -> None:
    """Write the folder `out` as `plan` says, or print the plan of a `dry_run`; what is found goes to stderr."""
    show_findings(plan.findings)
    for warning in plan.warnings:
        warn(warning)
    if dry_run:
        _show(plan, out, as_json=as_json)
        return
    if part is not None:
        _carry_out_part(plan, out, part, as_json=as_json, quiet=quiet, **how)
        return
    from lora_tool.pipeline.writing import intent, write

    gc.freeze()  # the plan stays: from here on only what the long work makes is looked through for cycles
    gc.set_threshold(100_000, 100)
    silent = quiet or as_json
    if not silent:
        say(_weighed(intent(plan)))
        sys.stdout.flush()  # before the long work, in a log too
    done = write(
        plan, out, watch=lambda what, total: progress_bar(what, total, quiet=silent), found=show_findings, **how
    )
    for late in done.warnings:
        if late not in {*plan.warnings, *map(str, plan.findings)}:
            warn(late)
    if as_json:
        click.echo(json.dumps(done.to_json(), indent=2))
    elif not quiet:
        say(_weighed(done.result(), done.verdict))


def _show(plan: Plan, out: Path, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text({"output": str(out), **plan.to_json()}, spread=_PLAN_LEVELS))
    else:
        say(f"would write {printable(str(out))}\n{plan}")


def _carry_out_part(
    plan: Plan,
    out: Path,
    part: Share,
    *,
    as_json: bool,
    quiet: bool,
    jobs: int | None,
    overwrite: bool,
    spread: Spread,
    resume: bool,
    verify: bool,  # noqa: ARG001 - the run that finishes the folder reads samples back
) -> None:
    """Write one share of the plan's files, and say what is still missing. Raises `click.UsageError`."""
    if spread.cluster is not None:
        raise click.UsageError("this machine writes a part, not the Ray cluster: leave out --part, or --engine ray")
    if resume:
        raise click.UsageError("--resume finishes what the parts have begun: leave out --part")
    from lora_tool.execution.shares import bytes_of, execute_share

    with progress_bar(f"part {part}", bytes_of(plan, part), quiet=quiet or as_json) as progress:
        done = execute_share(plan, out, part, jobs=jobs, overwrite=overwrite, progress=progress)
    if as_json:
        click.echo(json.dumps(done.to_json(), indent=2))
    elif not quiet:
        wrote = f"part {part} written: {counted(len(done.files), 'weight file')}, {size(done.nbytes)}"
        left = (
            f"{counted(len(done.missing), 'file')} of other parts still missing" if done.missing else "none is missing"
        )
        say(f"{wrote}; {left}\nnext: when all parts have ended, run the same command with --resume instead of --part")


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
