"""The table `[ci]` of `lora-tool.toml`: options of `lora-tool ci` by their names, where the command line is silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lora_tool.choices import suggestion
from lora_tool.cli.configuration import Configuration

_TYPED_ONLY = frozenset({"config", "help", "json", "quiet"})
"""Options that say how one run is shown."""
_PATHS = frozenset({"out", "adapter_config", "pairs"})


def apply_table(ctx: click.Context, configured: Configuration) -> None:
    """Set the parameters of the command that the table has, and neither command line nor environment.

    Relative paths in the table begin at its file. Raises `click.UsageError` naming file, key, what was expected and
    found, and the closest key.
    """
    names = _names(ctx.command)
    folder = configured.path.parent if configured.path else Path()
    for key, value in configured.ci.items():
        spelled = key.replace("_", "-")
        if spelled not in names:
            raise click.UsageError(f"{configured.path}: [ci]: {_unknown(key, names)}")
        where, option = f"{configured.path}: [ci] {key}", names[spelled]
        if ctx.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT:
            continue
        try:
            read = option.type_cast_value(ctx, _placed(option, _typed(option, value, where), folder))
        except (click.BadParameter, ValueError) as error:
            message = error.message if isinstance(error, click.BadParameter) else str(error)
            raise click.UsageError(f"{where}: {message}") from error
        ctx.params[option.name or ""] = not read if f"--{spelled}" in option.secondary_opts else read


def _names(command: click.Command) -> Mapping[str, click.Option]:
    """Return the options that may stand in the table by their long names, without dashes."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    typed = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    return {name[2:]: typed[name] for name in typed if name.startswith("--") and name[2:] not in _TYPED_ONLY}


def _unknown(key: str, names: Mapping[str, click.Option]) -> str:
    if key in _TYPED_ONLY or key == "checkpoint":
        return f"{key!r} is for the command line alone"
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
    if option.name in _PATHS:
        return str(folder / value)
    if option.name == "reports":
        return [_report_beside(entry, folder) for entry in value]
    if option.name == "base" and (folder / value).is_dir():
        return str(folder / value)
    return value


def _report_beside(entry: str, folder: Path) -> str:
    form, equals, path = entry.partition("=")
    return f"{form}={folder / path}" if equals and path else entry
