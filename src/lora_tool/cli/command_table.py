"""A command's own table of `lora-tool.toml`, such as `[merge]`: its options by their names, where the command line is silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lora_tool.cli.configuration import Configuration, configuration
from lora_tool.cli.options import FolderOrId, Timed, UserPath
from lora_tool.core.choices import suggestion

_TYPED_ONLY = frozenset({"config", "help", "json", "quiet", "verbose"})
"""Options that say how one run is shown, and where the table is."""
_SAY_THE_SAME = {"task": ("reward",), "reward": ("task", "num_labels")}
"""An option that was typed → those of which the table is not asked then."""
_READ = "lora_tool.configuration"


class Configured(Timed):
    """A command that has a table of its own, and ``--config``."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        """Run the command with the options of its table. Raises `click.UsageError` for a table that is wrong."""
        _apply_table(ctx, configured(ctx))
        return super().invoke(ctx)


def configured(ctx: click.Context) -> Configuration:
    """Return the configuration of a command that is checking the folders which it was given, read once."""
    if _READ not in ctx.meta:
        ctx.meta[_READ] = configuration(ctx.params["config_file"], tuple(_checked(ctx)) or (".",))
    read: Configuration = ctx.meta[_READ]
    return read


def _checked(ctx: click.Context) -> Iterator[str]:
    for param in ctx.command.params:
        if isinstance(param, click.Argument) and isinstance(param.type, FolderOrId | UserPath):
            value = ctx.params[param.name or ""]
            yield from map(str, value if isinstance(value, tuple) else (value,))


def _apply_table(ctx: click.Context, configured: Configuration) -> None:
    """Set the parameters of the command that its table has, and neither command line nor environment.

    Relative paths in the table begin at its file. Raises `click.UsageError` naming file, key, what was expected and
    found, and the closest key.
    """
    names, table = _names(ctx.command), f"[{ctx.command.name}]"
    folder = configured.path.parent if configured.path else Path()
    params = [param.name or "" for param in ctx.command.params]
    typed = {name for name in params if ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)}
    settled = typed.union(*(_SAY_THE_SAME.get(name, ()) for name in typed))
    for key, value in configured.tables.get(ctx.command.name or "", {}).items():
        spelled = key.replace("_", "-")
        if spelled not in names:
            raise click.UsageError(f"{configured.path}: {table}: {_unknown(key, ctx.command, names)}")
        where, option = f"{configured.path}: {table} {key}", names[spelled]
        name = option.name or ""
        if name in settled:
            continue
        try:
            read = option.process_value(ctx, _placed(option, _typed(option, value, where), folder))
        except (click.BadParameter, ValueError) as error:
            message = error.message if isinstance(error, click.BadParameter) else str(error)
            raise click.UsageError(f"{where}: {message}") from error
        ctx.params[name] = not read if f"--{spelled}" in option.secondary_opts else read
        ctx.set_parameter_source(name, ParameterSource.DEFAULT_MAP)


def _names(command: click.Command) -> Mapping[str, click.Option]:
    options = [param for param in command.params if isinstance(param, click.Option)]
    typed = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    return {name[2:]: typed[name] for name in typed if name.startswith("--") and name[2:] not in _TYPED_ONLY}


def _unknown(key: str, command: click.Command, names: Mapping[str, click.Option]) -> str:
    arguments = {param.name for param in command.params if isinstance(param, click.Argument)}
    if key in _TYPED_ONLY or key in arguments:
        return f"{key!r} can only be given on the command line"
    return f"unknown key {key!r}. {suggestion(key.replace('_', '-'), names)}"


def _typed(option: click.Option, value: object, where: str) -> object:
    """Return the value as the option's type takes it. Raises `click.UsageError` where TOML's type is another."""
    listed = value if option.multiple and isinstance(value, list) else [value]
    if option.is_flag:
        expected, right = "true or false", isinstance(value, bool)
    elif isinstance(option.type, click.FloatRange):
        expected, right = "a number", type(value) in (int, float)
    elif isinstance(option.type, click.IntRange):
        expected, right = "a whole number", type(value) is int
    else:
        expected = "a list of strings" if option.multiple else "a string"
        right = all(isinstance(item, str) and item for item in listed)
    if not right:
        raise click.UsageError(f"{where}: expected {expected}, found {value!r}")
    return listed if option.multiple else value


def _placed(option: click.Option, value: Any, folder: Path) -> Any:  # noqa: ANN401 - a value of TOML
    """Return the value with the paths in it as seen from `folder`, where the table is."""
    if isinstance(option.type, UserPath):
        return str(folder / value)
    if option.name == "reports":
        parts = [(entry, *entry.partition("=")) for entry in value]
        return [f"{form}={folder / path}" if equals and path else entry for entry, form, equals, path in parts]
    if isinstance(option.type, FolderOrId):
        listed = value if option.multiple else [value]
        placed = [str(folder / each) if (folder / each).is_dir() else each for each in listed]
        return placed if option.multiple else placed[0]
    return value
