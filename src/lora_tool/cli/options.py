"""Options that several commands have, spelled once."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from lora_tool.core.choices import Choice, above_zero, codes, count, flag, fraction, positive, proportion
from lora_tool.core.display import as_options, duration, printable
from lora_tool.core.errors import WrongValue
from lora_tool.core.options import Option, Options, Section, declared, on_command_line, sections
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
        return super().convert(typable(os.path.expanduser(value)), param, ctx)  # noqa: PTH111 - Path raises where nobody lives


PICTURES = (".png", ".svg", ".pdf", ".html")
"""What a picture can be, by the end of its file's name."""


class PicturePath(UserPath):
    """The file of a picture, whose name says what it becomes, or a folder for the files of several."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        path = super().convert(value, param, ctx)
        is_folder = not path.suffix and (str(value).endswith("/") or path.is_dir())
        if path.suffix not in PICTURES and not is_folder:
            self.fail(f"{path} does not end in one of {', '.join(PICTURES)}, or in / for a folder", param, ctx)
        from lora_tool.workflows.drawing import drawer

        drawer()  # what it lacks is an error before anything is read
        return path


def typable(path: str) -> str:
    """Return a path that no command takes for an option, which is how it is said in every hint."""
    return str(Path.cwd() / path) if str(Path(path)).startswith("-") else path


class FolderOrId(click.types.StringParamType):
    """A folder or a Hub id, taken as it is typed; shells complete it as a folder."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return typable(super().convert(value, param, ctx))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - click's signature
        return [CompletionItem(incomplete, type="dir")]


def rule_codes(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the codes of rules that a shell offers for the last of those between commas."""
    import lora_tool.rules.judging  # noqa: F401 - it registers the rules
    from lora_tool.rules.engine.registry import RULES

    before, comma, begun = incomplete.rpartition(",")
    known = ((code, rule.title) for code, rule in sorted(RULES.items()) if code.startswith(begun))
    return [CompletionItem(f"{before}{comma}{code}", help=title) for code, title in known]


class SectionOption(click.Option):
    """An option that knows its section in the help of a command."""

    def __init__(self, *spelling: Any, section: Section = Section.FIRST, **how: Any) -> None:
        super().__init__(*spelling, **how)
        self.section = section


def option_in(section: Section, *spelling: str, **how: Any) -> Callable[[Decorated], Decorated]:
    """Add an option, as `click.option` does, to a section of the help."""
    return click.option(*spelling, cls=SectionOption, section=section, **how)


class Sectioned(click.Command):
    """A command whose help has its options in sections; `among` is the heading over it in the list of all commands."""

    def __init__(self, *spelling: Any, among: str = "Added", **how: Any) -> None:
        super().__init__(*spelling, **how)
        self.among = among

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those of each section together."""
        rows: dict[Section, list[tuple[str, str]]] = {section: [] for section in Section}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None and isinstance(param, click.Option):
                rows[getattr(param, "section", Section.FIRST)].append(row)
        for section, found in rows.items():
            if found:
                with formatter.section(section.value):
                    formatter.write_dl(found)


def in_order(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Add all the options; help lists them in this order."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def plot_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--plot``; the `help_text` says what is drawn."""
    shapes = f"{help_text}: .png, .svg, .pdf, .html, or DIR/ for a PNG of each figure."
    return option_in(Section.PRINTED, "--plot", type=PicturePath(), metavar="FILE", help=shapes)


def say_drawn(path: Path) -> None:
    """Write to stderr that the picture is there."""
    click.echo(f"drawn: {printable(str(path))}", err=True)


def quiet_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``-q``; the `help_text` says what the command still prints."""
    return option_in(Section.PRINTED, "-q", "--quiet", is_flag=True, help=help_text)


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


verbose_option = option_in(
    Section.PRINTED,
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_hear,
    help="Print to stderr what was decided and why.",
)


def codes_option(section: Section, name: str, help_text: str) -> Callable[[Decorated], Decorated]:
    """Add an option of codes with commas between them, which may be given again; the command gets one tuple of all."""
    return option_in(
        section,
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


json_option = option_in(Section.PRINTED, "--json", "as_json", is_flag=True, help="Print the result as JSON.")
config_option = option_in(
    Section.INPUT,
    "--config",
    "config_file",
    type=UserPath(dir_okay=False),
    help="Configuration.  [default: lora-tool.toml or [tool.lora-tool] in pyproject.toml, here or above]",
)
fail_on_option = option_in(
    Section.CHECKS,
    "--fail-on",
    type=click.Choice([Severity.ERROR.value, Severity.WARNING.value]),
    default=Severity.ERROR.value,
    show_default=True,
    help="Fail on findings of this severity or worse.",
)
strict_option = option_in(
    Section.CHECKS,
    "--strict",
    is_flag=True,
    help="Read all weights, and also exit with 1 for warnings and for rules that could not run.",
)
report_option = option_in(
    Section.PRINTED,
    "--report",
    "reports",
    metavar="FORMAT=FILE",
    multiple=True,
    help="Also write the report to a file: junit=report.xml. May be repeated; weights are read only once.",
)
format_option = option_in(
    Section.PRINTED,
    "--format",
    "form",
    type=click.Choice([form.value for form in Form]),
    default=Form.TEXT.value,
    show_default=True,
    help="What is printed.",
)
LONG = 5.0
"""Seconds from which on somebody has waited, and wants to know how long."""


class Timed(Sectioned):
    """A command that says on stderr how long it took, where that was long and it may say something."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        """Run the command."""
        begun = time.monotonic()
        done = super().invoke(ctx)
        seconds = time.monotonic() - begun
        if seconds >= LONG and not ctx.params.get("quiet") and not ctx.params.get("as_json"):
            click.echo(f"took {duration(seconds)}", err=True)
        return done


# The declared options of a use case: each as click has it, and what was typed as one object.


_Chosen = TypeVar("_Chosen", bound=Options)

_NAME = re.compile(r"`([a-z_]+)`")


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


def options_of(kind: type[Options]) -> Callable[[Decorated], Decorated]:
    """Add the declared options, in their order."""
    known, places = declared(kind), sections(kind)
    spelled = {name: _spelled(name, how) for name, (how, _) in known.items()}

    def help_of(how: Option) -> str:
        named = _NAME.sub(lambda match: spelled.get(match[1], match[0]), how.help)
        return as_options(named)

    return in_order(
        *(
            _option(places[name], name, how, default, help_of(how))
            for name, (how, default) in known.items()
            if not how.library_only
        )
    )


def typed_as(kind: type[_Chosen], typed: Mapping[str, Any], **further: Any) -> _Chosen:
    """Return the options that were `typed`, with what `further` says. Raises `click.UsageError` for a contradiction."""
    values = {name: typed[name] for name in on_command_line(kind)}
    try:
        return kind(**{**values, **further})
    except WrongValue as error:
        if error.hint is not None:
            raise
        raise click.UsageError(as_options(str(error))) from error


reward_option = click.option("--rm", "reward", is_flag=True, help="Make a reward model; the same as --task reward.")


def typed_task(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task that ``--rm`` means, if it was `typed`. Raises `click.UsageError` for a contradiction."""
    task, labels = typed["task"], typed["num_labels"]
    if not typed["reward"]:
        return {}
    from lora_tool.plans.base.task import Task  # only where it is typed

    if task not in (Task.AUTO, Task.REWARD, Task.SEQ_CLS):
        raise click.UsageError(f"--rm means --task reward, but --task is {task}")
    if labels not in (None, 1):
        raise click.UsageError(f"--rm means one label, but --num-labels is {labels}")
    return {"task": Task.REWARD}


def _spelled(name: str, how: Option) -> str:
    return f"--{(how.name or name).replace('_', '-')}"


def _option(section: Section, name: str, how: Option, default: Any, text: str) -> Callable[[Decorated], Decorated]:  # noqa: ANN401
    typed = _spelled(name, how)
    spelling: dict[str, Any] = {"help": text, "metavar": how.metavar}
    add = partial(option_in, section)
    if how.parse is flag:
        both = typed if how.off is None else f"{typed}/--{how.off}"
        shown = how.off is not None and default is not None
        return add(both, name, default=default, show_default=shown, is_flag=True, **spelling)
    if how.parse is codes:
        return codes_option(section, typed, text)
    spelling |= {"type": _type(how), "multiple": how.many}
    if default is MISSING:
        return add(*how.short, typed, name, required=True, **spelling)
    given = None if default is None or how.many else str(default)
    return add(*how.short, typed, name, default=given, show_default=given is not None, **spelling)


def _type(how: Option) -> Any:  # noqa: ANN401 - a type of click, or a function
    numbers: dict[Any, click.ParamType] = {  # type: ignore[type-arg]
        positive: click.IntRange(min=1),
        count: click.IntRange(min=0),
        fraction: click.FloatRange(0, 1, min_open=True),
        proportion: click.FloatRange(0, 1),
        above_zero: click.FloatRange(min=0, min_open=True),
    }
    if how.parse in numbers:
        return numbers[how.parse]
    if isinstance(how.parse, type) and issubclass(how.parse, Choice):
        return ChoiceOf(how.parse)
    if how.parse is not None:
        return Parsed(how.parse)
    if how.metavar in ("PATH", "FILE", "DIR"):
        return UserPath(exists=how.existing, dir_okay=how.metavar != "FILE", file_okay=how.metavar != "DIR")
    return FolderOrId()
