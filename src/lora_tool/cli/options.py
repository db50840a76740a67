"""Options that several commands have, spelled once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from lora_tool.report.findings import Severity
from lora_tool.report.forms import Form

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class UserPath(click.Path):
    """A path, with `~` for the home folder: no shell puts that in where `--output=~/model` is typed."""

    def __init__(self, *, exists: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        return super().convert(os.path.expanduser(value), param, ctx)  # noqa: PTH111 - Path raises where nobody lives


def base_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--base``: a model's path or Hub id."""
    return click.option("--base", metavar="MODEL", help=help_text)


def json_option(command: Decorated) -> Decorated:
    """Add ``--json``: the result as JSON on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def quiet_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``-q``: less output; each command says what is left."""
    return click.option("-q", "--quiet", is_flag=True, help=help_text)


def format_option(command: Decorated) -> Decorated:
    """Add ``--format``: the form in which the report is printed."""
    forms = click.Choice([form.value for form in Form])
    return click.option(
        "--format", "form", type=forms, default=Form.TEXT.value, show_default=True, help="What is printed."
    )(command)


def report_option(command: Decorated) -> Decorated:
    """Add ``--report FORMAT=FILE``: the report in files, too; `reporting.report_file` reads the values."""
    return click.option(
        "--report",
        "reports",
        metavar="FORMAT=FILE",
        multiple=True,
        help="Write the report to a file as well: junit=report.xml. May be repeated; weights are read once.",
    )(command)


def fail_on_option(command: Decorated) -> Decorated:
    """Add ``--fail-on``: the least severity at which a command fails."""
    return click.option(
        "--fail-on",
        type=click.Choice([Severity.ERROR.value, Severity.WARNING.value]),
        default=Severity.ERROR.value,
        show_default=True,
        help="Fail for findings of this severity or worse.",
    )(command)


def select_option(command: Decorated) -> Decorated:
    """Add ``--select``: the rules to run, as one tuple of codes."""
    return codes_option("--select", "Only these rules: LT206, or LT2 for all that begin so.")(command)


def ignore_option(help_text: str = "Not these rules.") -> Callable[[Decorated], Decorated]:
    """Add ``--ignore``: rules not to run, as one tuple of codes."""
    return codes_option("--ignore", help_text)


def config_option(command: Decorated) -> Decorated:
    """Add ``--config``: the file to read instead of the nearest `lora-tool.toml`."""
    help_text = "Configuration.  [default: lora-tool.toml or [tool.lora-tool] in pyproject.toml, here or above]"
    return click.option("--config", "config_file", type=UserPath(dir_okay=False), help=help_text)(command)


def codes_option(name: str, help_text: str) -> Callable[[Decorated], Decorated]:
    """Add an option of codes with commas between them, which may be given again; the command gets one tuple of all."""
    return click.option(
        name,
        type=_comma_list,
        metavar="CODES",
        multiple=True,
        callback=lambda _, __, lists: sum(lists, ()),
        help=help_text,
    )


def require_rules(codes: Iterable[str]) -> None:
    """Return if each code means a rule. Raises `UnknownRule`."""
    if wanted := tuple(codes):
        import lora_tool.validation.validating  # noqa: F401, PLC0415 - it registers the rules, which only this needs
        from lora_tool.rules.engine.registry import expand  # noqa: PLC0415

        expand(wanted)


def _comma_list(value: str) -> tuple[str, ...]:
    """Return the entries between commas: the type of an option. Raises ValueError where there is none."""
    entries = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if not entries:
        raise ValueError(value)
    return entries


def jobs_option(command: Decorated) -> Decorated:
    """Add ``--jobs``: how many workers read and write."""
    return click.option("--jobs", type=click.IntRange(min=1), help="Workers.  [default: one per core]")(command)


def overwrite_option(command: Decorated) -> Decorated:
    """Add ``--overwrite``: a folder that we wrote may be replaced."""
    help_text = "Replace an output that lora-tool wrote, after success."
    return click.option("--overwrite", is_flag=True, help=help_text)(command)
