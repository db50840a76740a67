"""`lora-tool validate`: what is wrong with one or more folders."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec.structs import replace

from lora_tool.cli.configuration import Configuration, configuration, rule_choice
from lora_tool.cli.exit_codes import DONE, FINDINGS, exit_code
from lora_tool.cli.options import (
    FolderOrId,
    Sectioned,
    config_option,
    fail_on_option,
    format_option,
    json_option,
    options_of,
    quiet_option,
    report_option,
    strict_option,
    typed_as,
    verbose_option,
)
from lora_tool.cli.reporting import Reporting, report_files, report_text
from lora_tool.cli.terminal import progress_bar, say, show_error, wants_colour
from lora_tool.core.display import as_cell, as_options, counted, json_data, json_text, printable
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form
from lora_tool.core.report.model import Report, joined
from lora_tool.workflows.caller import Caller
from lora_tool.workflows.validate import ValidatedOne, ValidateEachOptions, validate_each

if TYPE_CHECKING:
    from lora_tool.workflows.fixes import Fixes

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
"""How the lines of a diff begin → the colour."""


@click.command("validate", cls=Sectioned, epilog="Example: lora-tool validate fixtures/reward-qwen2/adapter --rm")
@click.argument("paths", nargs=-1, type=FolderOrId(), metavar="[PATH]...")
@options_of(ValidateEachOptions)
@click.option("--rm", "reward", is_flag=True, help="Expect a reward model: a head with one label.")
@fail_on_option
@strict_option
@format_option
@report_option
@config_option
@json_option
@quiet_option("Print nothing unless there are findings; JSON and XML are always printed.")
@verbose_option
@click.pass_context
def command(ctx: click.Context, /, paths: tuple[str, ...], *, reward: bool, quiet: bool, **typed: Any) -> int:
    """Check each PATH for errors: an adapter, model, checkpoint or run folder, or an adapter on the Hub.

    PATH defaults to the current folder. Several paths are checked one by one; the output ends with a table and the exit
    code is the highest. Only --fix --apply changes files, and code in them is never run. An adapter on the Hub,
    owner/name[@revision], hf://owner/name or the URL of its page, is downloaded to huggingface_hub's cache (adapters
    are small); the base model never is.
    """
    paths = paths or (".",)
    if reward and typed["num_labels"] not in (None, 1):
        raise click.UsageError(f"--rm means one label, but --num-labels is {typed['num_labels']}")
    configured = configuration(typed["config_file"], paths)
    rules = rule_choice(ctx, configured)
    reporting = _reporting(ctx, configured, rules.fail_on)
    options = typed_as(
        ValidateEachOptions,
        typed,
        task="reward" if reward else None,
        select=rules.select,
        ignore=rules.ignore,
        deep=True if reporting.strict and typed["deep"] is None else typed["deep"],
        servers=typed["servers"] or configured.servers,
    )
    validated = validate_each(paths, options, Caller(progress=partial(progress_bar, quiet=quiet)))
    folders = validated.folders
    report = replace(joined(each.report for each in folders), ignored=rules.ignored)
    _show(report, reporting, validated.fixes, quiet=quiet)
    unasked = quiet or options.fix or options.servers or options.adapters or reporting.fails(report)
    if len(folders) == 1 and reporting.form is Form.TEXT and not unasked:
        typed_too = [*(["--rm"] if reward else ()), *(["--base", typed["base"]] if typed["base"] else ())]
        _show_next(report, paths[0], typed_too)
    errors = [each.error for each in folders if each.error is not None]
    for error in errors:
        show_error(error)
    if len(folders) > 1 and reporting.form is Form.TEXT and not (quiet and not report.findings):
        from lora_tool.cli.tables import show_table  # rich, only where it is shown

        click.echo()
        columns = ("folder", "kind", "verdict", "errors>", "warnings>", "first")
        show_table(columns, (_row(each, reporting) for each in folders))
    return max(map(exit_code, errors), default=FINDINGS if reporting.fails(report) else DONE)


def _reporting(ctx: click.Context, configured: Configuration, fail_on: Severity) -> Reporting:
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


def _show(report: Report, reporting: Reporting, fixes: Fixes | None, *, quiet: bool) -> None:
    nothing = not report.subjects and reporting.form is Form.TEXT  # the errors on stderr say all there is
    silent = quiet and not report.findings and reporting.form in (Form.TEXT, Form.GITHUB)
    text = reporting.form is Form.TEXT
    shown = "" if fixes is None else "\n".join(_fix_lines(fixes, color=text and wants_colour()))
    if fixes is not None and fixes.kept and reporting.form is not Form.JSON:
        click.echo(f"{shown}\n", err=not text)  # before what is found now
    if fixes is not None and reporting.form is Form.JSON:
        click.echo(json_text({**report.to_json(), "fixes": _fixes_json(fixes)}, spread=3))
    elif not nothing and not silent:
        (say if text else click.echo)(report_text(report, reporting.form, reporting.least, color=wants_colour()))
    if fixes is not None and not fixes.kept and reporting.form is not Form.JSON and not nothing:
        click.echo(f"\n{shown}", err=not text)
    reporting.write_files(lambda form: report_text(report, form, reporting.least))


def _show_next(report: Report, path: str, typed: Sequence[str]) -> None:
    """Print what is typed next with a clean folder, or the best save of a run, with what was `typed` of its merge.

    Where a plain merge would refuse it, the finding says what to do.
    """
    from lora_tool.rules.judging import NOT_MERGED  # which has judged

    if any(finding.code == NOT_MERGED for finding in report.findings):
        return
    lacks_base = any("use --base" in each.reason for each in report.skipped)
    best = next((run.best for run in report.runs), None)
    if report.at_least(Severity.ERROR if best else Severity.WARNING) or not report.subjects or lacks_base:
        return
    subject = next((each for each in report.subjects if each.path == best), report.subjects[0])
    command = "merge" if best and subject.command != "consolidate" else subject.command
    if command in ("merge", "consolidate", "verify"):
        words = [command, *(typed if command == "merge" else ()), best or path]
        click.echo(f"next: lora-tool {printable(shlex.join(words))}")


def _row(one: ValidatedOne, reporting: Reporting) -> Iterator[str]:
    report = one.report
    yield one.path
    yield report.subjects[0].kind if report.subjects else ""
    if one.error is not None:
        yield from ("not read", "", "", as_cell(as_options(str(one.error))))
        return
    yield "failed" if reporting.fails(report) else "passed"
    yield from (str(report.count(severity) or "") for severity in (Severity.ERROR, Severity.WARNING))
    found = sorted(report.at_least(Severity.WARNING), key=lambda finding: -finding.severity.weight)
    yield as_cell(str(found[0])) if found else ""


def _fixes_json(fixes: Fixes) -> list[dict[str, Any]]:
    """Return the changes as JSON data; `kept` is null where nothing was written."""
    kept = fixes.kept or (None,) * len(fixes.changes)
    return [
        json_data({"path": change.path, "codes": change.codes, "diff": change.diff, "kept": copy})
        for change, copy in zip(fixes.changes, kept, strict=True)
    ]


def _fix_lines(fixes: Fixes, *, color: bool = False) -> Iterator[str]:
    for change in fixes.changes:
        for line in change.diff:
            fg = _COLOURS.get(line[:1]) if color else None
            yield click.style(printable(line), fg=fg) if fg else printable(line)
    if fixes.kept:
        for change, kept in zip(fixes.changes, fixes.kept, strict=True):
            yield f"changed {printable(str(change.path))}; the original is {printable(kept.name)}"
    elif fixes.changes:
        answered = {code for change in fixes.changes for code in change.codes}
        files = counted(len(fixes.changes), "file")
        codes = ", ".join(sorted(answered))
        yield f"--fix --apply would change {files} for {codes}, and keep each original as FILE.orig"
    else:
        yield "--fix has nothing to change"
