"""`lora-tool validate`: what is wrong with one or more folders."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, open_adapter, open_checkpoint
from lora_tool.cli.configuration import Configuration, configuration, rule_choice
from lora_tool.cli.exit_codes import DONE, FINDINGS, exit_code
from lora_tool.cli.options import (
    FolderOrId,
    base_option,
    config_option,
    format_option,
    json_option,
    quiet_option,
    report_option,
    rule_options,
    verbose_option,
)
from lora_tool.cli.reporting import Reporting, report_files, report_text
from lora_tool.cli.terminal import progress_bar, say, show_error, wants_colour
from lora_tool.display import as_cell, as_options, json_text
from lora_tool.errors import LoraToolError, of_system
from lora_tool.hub_names import ANYWHERE
from lora_tool.report.findings import Severity
from lora_tool.report.forms import Form
from lora_tool.report.model import Report, Unread, joined
from lora_tool.rules.engine.subjects import Server
from lora_tool.sources import Wanted, opened_model, resolve
from lora_tool.validation.validating import validate

if TYPE_CHECKING:
    from lora_tool.cli.fixing import Fixes

_LONG = 1 << 30
"""Bytes that take half a second to read from the page cache, and long from a disk."""


@click.command("validate", epilog="Example: lora-tool validate fixtures/reward-qwen2/adapter --rm")
@click.argument("paths", nargs=-1, type=FolderOrId(), metavar="[PATH]...")
@base_option(
    f"Base model to compare with: {ANYWHERE}, never downloaded.  [default: what adapter_config.json names, if on this disk]"
)
@click.option(
    "--adapter",
    "adapters",
    type=FolderOrId(),
    multiple=True,
    metavar="ADAPTER",
    help="Adapter that the model PATH was merged with, or that the adapter PATH is to be merged together with.",
)
@click.option("--rm", "reward", is_flag=True, help="Expect a reward model: a head with one label.")
@click.option("--num-labels", type=click.IntRange(min=1), help="Number of labels that the head must have.")
@click.option(
    "--deep/--headers-only", default=None, help="Read all weights, or none.  [default: only those of adapters]"
)
@click.option(
    "--for",
    "servers",
    type=click.Choice([server.value for server in Server]),
    multiple=True,
    help="Report what this server refuses or ignores. May be repeated.",
)
@rule_options
@click.option(
    "--strict",
    is_flag=True,
    help="Read all weights, and also exit with 1 for warnings and for rules that could not run.",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Show a diff of the mechanical fixes to configs and names; weights are never changed.",
)
@click.option("--apply", is_flag=True, help="Make the changes that --fix shows; each original is kept as FILE.orig.")
@format_option
@report_option
@config_option
@json_option
@quiet_option("Print nothing unless there are findings; JSON and XML are always printed.")
@verbose_option
@click.pass_context
def command(ctx: click.Context, /, paths: tuple[str, ...], **options: Any) -> int:
    """Check each PATH for errors: an adapter, model, checkpoint or run folder, or an adapter on the Hub.

    PATH is this folder by default; of several, each is checked on its own, a table ends the output, and the exit code
    is the largest of all. Only --fix --apply changes files, and code in them is never run. An adapter on the Hub,
    owner/name[@revision], hf://owner/name or the URL of its page, is downloaded to huggingface_hub's cache (adapters
    are small); the base model never is.
    """
    paths = paths or (".",)
    if options["reward"] and options["num_labels"] not in (None, 1):
        raise click.UsageError(f"--rm means one label, but --num-labels is {options['num_labels']}")
    if options["apply"] and not options["fix"]:
        raise click.UsageError("--apply needs --fix")
    configured = configuration(options["config_file"], paths)
    rules = rule_choice(ctx, configured)
    told = _reporting(ctx, configured, rules.fail_on)
    asked = {
        "base": None if options["base"] is None else opened_model(options["base"], download=False),
        "adapters": tuple(map(_open_adapter, options["adapters"])),
        "num_labels": options["num_labels"],
        "task": "reward" if options["reward"] else None,
        "select": rules.select,
        "ignore": rules.ignore,
        "deep": True if told.strict and options["deep"] is None else options["deep"],
        "servers": options["servers"] or configured.servers,
    }
    looked = _all_judged(paths, asked, quiet=options["quiet"])
    fixed = None
    if options["fix"]:
        from lora_tool.cli.fixing import fixes  # only where asked for

        fixed = fixes(joined(each.report for each in looked), task=asked["task"], apply=options["apply"])
        if fixed.kept:
            looked = _all_judged(paths, asked, quiet=options["quiet"])
    report = replace(joined(each.report for each in looked), ignored=rules.ignored)
    _show(report, told, fixed, quiet=options["quiet"])
    errors = [each.error for each in looked if each.error is not None]
    for error in errors:
        show_error(error)
    if len(looked) > 1 and told.form is Form.TEXT and not (options["quiet"] and not report.findings):
        _show_table(looked, told)
    return max(map(exit_code, errors), default=FINDINGS if told.fails(report) else DONE)


class _Looked(Struct, frozen=True, kw_only=True):
    """One of the folders, as it was given: its report, and the `error` where it could not be opened."""

    path: str
    report: Report
    error: LoraToolError | None = None


def _all_judged(paths: Sequence[str], asked: Mapping[str, Any], *, quiet: bool) -> list[_Looked]:
    """Return what was found in each of the folders. One that cannot be opened stops no other."""
    return [_looked_at(path, asked, quiet=quiet) for path in paths]


def _looked_at(path: str, asked: Mapping[str, Any], *, quiet: bool) -> _Looked:
    try:
        return _Looked(path=path, report=_judged(path, asked, quiet=quiet))
    except LoraToolError as refused:
        error = refused
    except OSError as failed:
        error = of_system(failed, path)
    return _Looked(path=path, report=Report(unread=(Unread.of(path, error),)), error=error)


def _reporting(ctx: click.Context, configured: Configuration, fail_on: Severity) -> Reporting:
    """Return how to report: each setting from the command line, else from the configuration."""
    options = ctx.params

    def chosen(name: str, setting: Any) -> Any:  # noqa: ANN401 - of the option's own type
        silent = ctx.get_parameter_source(name) in (ParameterSource.DEFAULT, None)
        return setting if silent and setting is not None else options[name]

    return Reporting(
        form=Form.JSON if options["as_json"] else Form(chosen("form", configured.form)),
        files=report_files(options["reports"], configured),
        fail_on=fail_on,
        strict=bool(chosen("strict", configured.strict)),
    )


def _judged(path: str, asked: Mapping[str, Any], *, quiet: bool) -> Report:
    checkpoint = open_checkpoint(resolve(path, download=True, wanted=Wanted.ADAPTER).path)

    def watch(nbytes: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        return progress_bar("reading rank files", nbytes, quiet=quiet or nbytes < _LONG)

    with _bar(checkpoint, deep=asked["deep"], quiet=quiet) as progress:
        return validate(checkpoint, checkpoints=True, progress=progress, watch=None if progress else watch, **asked)


def _bar(
    checkpoint: Checkpoint, *, deep: bool | None, quiet: bool
) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
    """Return a progress bar where so much will be read that somebody would wait, else nothing."""
    if isinstance(checkpoint, AdapterDir | ModelDir):
        total, read = checkpoint.weights.nbytes, deep or (deep is None and isinstance(checkpoint, AdapterDir))
        if read and total >= _LONG:
            return progress_bar("reading weights", total, quiet=quiet)
    return contextlib.nullcontext()


def _open_adapter(reference: str) -> AdapterDir:
    path = resolve(reference, download=True, wanted=Wanted.ADAPTER).path
    return open_adapter(path, hint="give an adapter with --adapter ADAPTER")


def _show(report: Report, told: Reporting, fixed: Fixes | None, *, quiet: bool) -> None:
    nothing = not report.subjects and told.form is Form.TEXT  # the errors on stderr say all there is
    silent = quiet and not report.findings and told.form in (Form.TEXT, Form.GITHUB)
    text = told.form is Form.TEXT
    shown = "" if fixed is None else "\n".join(fixed.lines(color=text and wants_colour()))
    if fixed is not None and fixed.kept and told.form is not Form.JSON:
        click.echo(f"{shown}\n", err=not text)  # before what is found now
    if fixed is not None and told.form is Form.JSON:
        from lora_tool.report.json import report_json  # JSON's words, only where asked for

        click.echo(json_text({**report_json(report), "fixes": fixed.to_json()}, spread=3))
    elif not nothing and not silent:
        (say if text else click.echo)(report_text(report, told.form, told.least, color=wants_colour()))
    if fixed is not None and not fixed.kept and told.form is not Form.JSON and not nothing:
        click.echo(f"\n{shown}", err=not text)
    told.write_files(lambda form: report_text(report, form, told.least))


def _show_table(looked: Sequence[_Looked], told: Reporting) -> None:
    """Print a line for each of several folders."""
    from lora_tool.cli.tables import new_table, print_all  # rich, only where it is shown

    columns = ("folder", "kind", "verdict", "errors>", "warnings>", "first")
    click.echo()
    print_all([new_table(columns, [tuple(_row(each, told)) for each in looked])], sys.stdout)


def _row(looked: _Looked, told: Reporting) -> Iterator[str]:
    report = looked.report
    yield looked.path
    yield report.subjects[0].kind if report.subjects else ""
    if looked.error is not None:
        yield from ("not read", "", "", as_cell(as_options(str(looked.error))))
        return
    yield "failed" if told.fails(report) else "passed"
    yield from (str(report.count(severity) or "") for severity in (Severity.ERROR, Severity.WARNING))
    found = sorted(report.at_least(Severity.WARNING), key=lambda finding: -finding.severity.weight)
    yield as_cell(str(found[0])) if found else ""
