"""Options that several commands have, spelled once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from lora_tool.core.display import duration, printable
from lora_tool.core.progress import reasons
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class UserPath(click.Path):
    """A path, with `~` for the home folder: no shell puts that in where `--output=~/model` is typed."""

    def __init__(self, *, exists: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        # what may not be read is said as of every input, and is no usage error
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, readable=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        return super().convert(os.path.expanduser(value), param, ctx)  # noqa: PTH111 - Path raises where nobody lives


PICTURES = (".png", ".svg", ".pdf", ".html")
"""What a picture can be, by the end of its file's name."""


class PicturePath(UserPath):
    """The file of a picture, whose name says what it becomes."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        path = super().convert(value, param, ctx)
        if path.suffix not in PICTURES:
            self.fail(f"{path} does not end in one of {', '.join(PICTURES)}", param, ctx)
        from lora_tool.workflows.drawing import drawer

        drawer()  # what it lacks is an error before anything is read
        return path


class FolderOrId(click.types.StringParamType):
    """A folder or a Hub id, taken as it is typed; shells complete it as a folder."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - click's signature
        return [CompletionItem(incomplete, type="dir")]


def rule_codes(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the codes of rules that a shell offers for the last of those between commas."""
    import lora_tool.rules.judging  # noqa: F401 - it registers the rules
    from lora_tool.rules.engine.registry import RULES

    before, comma, begun = incomplete.rpartition(",")
    known = ((code, rule.title) for code, rule in sorted(RULES.items()) if code.startswith(begun))
    return [CompletionItem(f"{before}{comma}{code}", help=title) for code, title in known]


def in_order(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Add all the options; help lists them in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def plot_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--plot``; the `help_text` says what is drawn."""
    return click.option("--plot", type=PicturePath(), metavar="FILE", help=f"{help_text}: .png, .svg, .pdf or .html.")


def say_drawn(path: Path) -> None:
    """Write to stderr that the picture is there."""
    click.echo(f"drawn: {printable(str(path))}", err=True)


def quiet_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``-q``; the `help_text` says what the command still prints."""
    return click.option("-q", "--quiet", is_flag=True, help=help_text)


def _hear(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
    if not value:
        return
    from lora_tool.cli.terminal import tell  # for those who ask

    said: set[str] = set()

    def say(what: str) -> None:
        if what not in said:
            tell("decided", what)
        said.add(what)

    reasons.set(say)


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_hear,
    help="Print to stderr what was decided and why.",
)


def codes_option(name: str, help_text: str) -> Callable[[Decorated], Decorated]:
    """Add an option of codes with commas between them, which may be given again; the command gets one tuple of all."""
    return click.option(
        name,
        type=_comma_list,
        metavar="CODES",
        multiple=True,
        callback=lambda _, __, lists: sum(lists, ()),
        shell_complete=rule_codes,
        help=help_text,
    )


def _comma_list(value: str) -> tuple[str, ...]:
    """Return the entries between commas: the type of an option. Raises ValueError where there is none."""
    entries = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if not entries:
        raise ValueError(value)
    return entries


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
config_option = click.option(
    "--config",
    "config_file",
    type=UserPath(dir_okay=False),
    help="Configuration.  [default: lora-tool.toml or [tool.lora-tool] in pyproject.toml, here or above]",
)
fail_on_option = click.option(
    "--fail-on",
    type=click.Choice([Severity.ERROR.value, Severity.WARNING.value]),
    default=Severity.ERROR.value,
    show_default=True,
    help="Fail on findings of this severity or worse.",
)
report_option = click.option(
    "--report",
    "reports",
    metavar="FORMAT=FILE",
    multiple=True,
    help="Also write the report to a file: junit=report.xml. May be repeated; weights are read only once.",
)
format_option = click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in Form]),
    default=Form.TEXT.value,
    show_default=True,
    help="What is printed.",
)
LONG = 5.0
"""Seconds from which on somebody has waited, and wants to know how long."""


class Timed(click.Command):
    """A command that says on stderr how long it took, where that was long and it may say something."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        """Run the command."""
        begun = time.monotonic()
        done = super().invoke(ctx)
        seconds = time.monotonic() - begun
        if seconds >= LONG and not ctx.params.get("quiet") and not ctx.params.get("as_json"):
            click.echo(f"took {duration(seconds)}", err=True)
        return done
