"""`lora-tool validate`: what is wrong with one or more folders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
from click.core import ParameterSource

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, open_adapter, open_checkpoint
from lora_tool.cli.configuration import Configuration, configuration
from lora_tool.cli.exit_codes import CANNOT, DONE, FINDINGS, exit_code
from lora_tool.cli.options import (
    base_option,
    config_option,
    fail_on_option,
    format_option,
    ignore_option,
    json_option,
    quiet_option,
    report_option,
    select_option,
)
from lora_tool.cli.progress import progress_bar
from lora_tool.cli.reporting import ReportFile, report_file, require_different
from lora_tool.cli.rule_choice import RuleChoice, rule_choice
from lora_tool.cli.terminal import show_error, wants_colour
from lora_tool.display import as_options
from lora_tool.errors import LoraToolError
from lora_tool.report.findings import Severity
from lora_tool.report.forms import Form, rendered
from lora_tool.report.model import Report, Unread, joined
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.judging import NO_BASE
from lora_tool.sources import Wanted, resolve
from lora_tool.validation.bases import named_base, open_base
from lora_tool.validation.validating import validate

_LONG = 1 << 30
"""Bytes that take half a second to read from the page cache, and long from a disk."""


@click.command("validate", epilog="Example: lora-tool validate fixtures/reward-qwen2/adapter --rm")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@base_option("Base model to compare with.  [default: what adapter_config.json names, if it is on this disk]")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="ADAPTER",
    help="Adapter that a model, given as PATH, was merged with, or that an adapter is to be merged together with.",
)
@click.option("--rm", "reward", is_flag=True, help="A reward model is expected: a head with one label.")
@click.option("--num-labels", type=click.IntRange(min=1), help="Labels that the head must have.")
@click.option("--deep/--headers-only", default=None, help="Read all weights, or none.  [default: those of adapters]")
@click.option(
    "--for",
    "servers",
    type=click.Choice([server.value for server in Server]),
    multiple=True,
    help="Say what this server refuses or ignores. May be repeated.",
)
@select_option
@ignore_option()
@fail_on_option
@click.option(
    "--strict",
    is_flag=True,
    help="Read all weights, and exit with 1 for warnings and for rules that could not run, too.",
)
@format_option
@report_option
@config_option
@json_option
@quiet_option("Print nothing unless there are findings; JSON and XML are printed all the same.")
@click.pass_context
def command(ctx: click.Context, /, paths: tuple[str, ...], **options: Any) -> int:  # noqa: ANN401 - click's options by name
    """Say what is wrong with each PATH: an adapter, model, checkpoint or run folder, or an adapter's Hub id.

    PATH is this folder by default. Files are read, never changed, and no code in them is run. A Hub id given as PATH
    is downloaded to huggingface_hub's cache (adapters are small); the base model never is.
    """
    paths = paths or (".",)
    asked = _asked(ctx, options, configuration(options["config_file"], paths))
    given_base = open_base(resolve(options["base"]).path) if options["base"] is not None else None
    adapters = tuple(map(_open_adapter, options["adapters"]))
    reports: list[Report] = []
    errors: list[LoraToolError] = []
    for path in paths:
        error: LoraToolError
        try:
            reports.append(_judged(path, asked, given_base, adapters))
        except LoraToolError as unreadable:
            error = unreadable
        except OSError as unreadable:
            error = LoraToolError(f"{unreadable.filename or path}: {unreadable.strerror or unreadable}")
        else:
            continue
        errors.append(error)
        reports.append(
            Report(
                unread=(Unread(path=path, message=as_options(str(error)), hint=error.hint and as_options(error.hint)),)
            )
        )
    report = replace(joined(reports), ignored=asked.rules.ignored)
    _show(report, asked)
    return _exit_code(report, errors, asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line and the configuration together ask for."""

    reward: bool
    num_labels: int | None
    deep: bool | None
    rules: RuleChoice
    servers: frozenset[Server]
    strict: bool
    form: Form
    files: tuple[ReportFile, ...]
    quiet: bool


def _asked(ctx: click.Context, options: Mapping[str, Any], configured: Configuration) -> _Asked:
    """Return the options, with the configuration's where the command line has none. Raises `click.UsageError`."""
    reward, num_labels = options["reward"], options["num_labels"]
    if reward and num_labels not in (None, 1):
        raise click.UsageError(f"--rm means one label, --num-labels {num_labels} was given")

    def chosen(name: str, setting: Any) -> Any:  # noqa: ANN401 - of the option's own type
        silent = ctx.get_parameter_source(name) in (ParameterSource.DEFAULT, None)
        return setting if silent and setting is not None else options[name]

    folder = configured.path.parent if configured.path else None
    files = [report_file(value) for value in options["reports"]]
    files = files or [report_file(value, folder) for value in configured.reports]
    require_different(files)
    strict = bool(chosen("strict", configured.strict))
    return _Asked(
        reward=reward,
        num_labels=num_labels,
        # strict means that everything is checked
        deep=True if strict and options["deep"] is None else options["deep"],
        rules=rule_choice(ctx, options, configured),
        servers=frozenset(map(Server, options["servers"] or configured.servers)),
        strict=strict,
        form=Form.JSON if options["as_json"] else Form(chosen("form", configured.form)),
        files=tuple(files),
        quiet=options["quiet"],
    )


def _judged(path: str, asked: _Asked, given_base: ModelDir | None, adapters: tuple[AdapterDir, ...]) -> Report:
    checkpoint = open_checkpoint(resolve(path, download=True, wanted=Wanted.ADAPTER).path)
    of_merged = adapters[0] if adapters and isinstance(checkpoint, ModelDir) else checkpoint
    base, why_not = (given_base, NO_BASE) if given_base is not None else named_base(of_merged)
    with _bar(checkpoint, asked) as progress:
        return validate(
            checkpoint,
            base=base,
            adapters=adapters,
            num_labels=1 if asked.reward else asked.num_labels,
            task="reward" if asked.reward else None,
            select=asked.rules.select,
            ignore=asked.rules.ignore,
            deep=asked.deep,
            servers=asked.servers,
            checkpoints=True,
            progress=progress,
            watch=None if progress else lambda nbytes: _watch(nbytes, asked),
            why_no_base=why_not,
        )


def _bar(checkpoint: Checkpoint, asked: _Asked) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
    """Return a progress bar where so much will be read that somebody would wait, else nothing."""
    if isinstance(checkpoint, AdapterDir | ModelDir):
        total = checkpoint.weights.nbytes
        read = asked.deep or (asked.deep is None and isinstance(checkpoint, AdapterDir))
        if read and total >= _LONG:
            return progress_bar("reading weights", total, quiet=asked.quiet)
    return contextlib.nullcontext()


def _watch(nbytes: int, asked: _Asked) -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """Return a progress bar for the reading of rank files, where it is long."""
    return progress_bar("reading rank files", nbytes, quiet=asked.quiet or nbytes < _LONG)


def _open_adapter(reference: str) -> AdapterDir:
    path = resolve(reference, download=True, wanted=Wanted.ADAPTER).path
    return open_adapter(path, hint="give an adapter: --adapter ADAPTER")


def _show(report: Report, asked: _Asked) -> None:

    def text(form: Form, *, color: bool = False) -> str:
        return rendered(report, form, pages=RULES, fail_on=asked.rules.fail_on, color=color)

    nothing = not report.subjects and asked.form is Form.TEXT  # the errors on stderr say all there is
    quiet = asked.quiet and not report.findings and asked.form in (Form.TEXT, Form.GITHUB)
    if not nothing and not quiet:
        click.echo(text(asked.form, color=asked.form is Form.TEXT and wants_colour()))
    for file in asked.files:
        try:
            file.write(text(file.form))
        except OSError as error:
            raise LoraToolError(f"{file.path}: the report cannot be written: {error.strerror}") from error


def _exit_code(report: Report, errors: list[LoraToolError], asked: _Asked) -> int:
    for error in errors:
        show_error(error)
    if errors:
        return max(map(exit_code, errors), default=CANNOT)
    failed = report.at_least(Severity.WARNING if asked.strict else asked.rules.fail_on) or (
        asked.strict and report.skipped
    )
    return FINDINGS if failed else DONE
