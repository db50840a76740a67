"""The options of a merge on a command line, as `plan.merge.options` declares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from lora_tool.choices import Choice, codes, flag, positive
from lora_tool.cli.options import Decorated, FolderOrId, UserPath, codes_option, in_order
from lora_tool.cli.writing import ChoiceOf, Parsed
from lora_tool.options import Option, declared, on_command_line
from lora_tool.plan.base.task import Task
from lora_tool.plan.merge.options import MergeOptions

Options = TypeVar("Options", bound=MergeOptions)


def merge_options(options: type[MergeOptions]) -> Callable[[Decorated], Decorated]:
    """Add the declared options of a merge, in their order, and ``--rm``."""
    reward = click.option("--rm", "reward", is_flag=True, help="Make a reward model; the same as --task reward.")
    typed = [_option(name, how, default) for name, (how, default) in on_command_line(options).items()]
    return in_order(*typed[:2], reward, *typed[2:])


def _option(name: str, how: Option, default: Any) -> Callable[[Decorated], Decorated]:  # noqa: ANN401 - of any type
    typed = f"--{(how.name or name).replace('_', '-')}"
    spelling: dict[str, Any] = {"help": how.help, "metavar": how.metavar}
    if how.parse is flag:
        spelling |= {"default": default, "is_flag": True}
        typed, shown = (f"{typed}/--no-{typed[2:]}", True) if default else (typed, False)
        return click.option(typed, name, show_default=shown, **spelling)
    if how.parse is codes:
        return codes_option(typed, how.help)
    if isinstance(how.parse, type) and issubclass(how.parse, Choice):
        kind: Any = ChoiceOf(how.parse)
    elif how.parse is positive:
        kind = click.IntRange(min=1)
    else:
        kind = UserPath() if how.metavar == "PATH" else Parsed(how.parse) if how.parse else FolderOrId()
    given = None if default is None else str(default)
    return click.option(*how.short, typed, name, type=kind, default=given, show_default=given is not None, **spelling)


def spread_options(function: Decorated) -> Decorated:
    """Add the options that say where the work is done, as `merge` has them."""
    options = declared(MergeOptions)
    return in_order(*(_option(name, *options[name]) for name in ("engine", "address", "workers")))(function)


def asked(options: type[Options], typed: Mapping[str, Any]) -> Options:
    """Return the `options` that were typed, ``--rm`` as the task it means. Raises `click.UsageError`."""
    task, labels = typed["task"], typed["num_labels"]
    values = {name: typed[name] for name in on_command_line(options)}
    if typed["reward"]:
        if task not in (Task.AUTO, Task.REWARD, Task.SEQ_CLS):
            raise click.UsageError(f"--rm means --task reward, but --task is {task}")
        if labels not in (None, 1):
            raise click.UsageError(f"--rm means one label, but --num-labels is {labels}")
        values["task"] = Task.REWARD
    return options(**values)
