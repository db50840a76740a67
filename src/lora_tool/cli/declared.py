"""The declared options of a use case on a command line: each as click has it, and what was typed as one object."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import Any, TypeVar

import click

from lora_tool.cli.options import Decorated, FolderOrId, UserPath, codes_option, in_order
from lora_tool.core.choices import Choice, above_zero, codes, count, flag, fraction, positive, proportion
from lora_tool.core.display import as_options
from lora_tool.core.errors import WrongValue
from lora_tool.core.options import Option, Options, declared, on_command_line
from lora_tool.plans.base.task import Task

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
    known = declared(kind)
    spelled = {name: _spelled(name, how) for name, (how, _) in known.items()}

    def help_of(how: Option) -> str:
        named = _NAME.sub(lambda match: spelled.get(match[1], match[0]), how.help)
        return as_options(named)

    return in_order(
        *(_option(name, how, default, help_of(how)) for name, (how, default) in known.items() if not how.library_only)
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
    if task not in (Task.AUTO, Task.REWARD, Task.SEQ_CLS):
        raise click.UsageError(f"--rm means --task reward, but --task is {task}")
    if labels not in (None, 1):
        raise click.UsageError(f"--rm means one label, but --num-labels is {labels}")
    return {"task": Task.REWARD}


def _spelled(name: str, how: Option) -> str:
    return f"--{(how.name or name).replace('_', '-')}"


def _option(name: str, how: Option, default: Any, text: str) -> Callable[[Decorated], Decorated]:  # noqa: ANN401
    typed = _spelled(name, how)
    spelling: dict[str, Any] = {"help": text, "metavar": how.metavar}
    if how.parse is flag:
        both = typed if how.off is None else f"{typed}/--{how.off}"
        shown = how.off is not None and default is not None
        return click.option(both, name, default=default, show_default=shown, is_flag=True, **spelling)
    if how.parse is codes:
        return codes_option(typed, text)
    spelling |= {"type": _type(how), "multiple": how.many}
    if default is MISSING:
        return click.option(*how.short, typed, name, required=True, **spelling)
    given = None if default is None or how.many else str(default)
    return click.option(*how.short, typed, name, default=given, show_default=given is not None, **spelling)


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
