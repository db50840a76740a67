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
_PATHS = frozenset({"out", "adapter_config"})


def with_table(ctx: click.Context, configured: Configuration) -> dict[str, Any]:
    """Return the options of the command, those of the table where neither command line nor environment has them.

    Relative paths in the table begin at its file. Raises `click.UsageError` naming file, key, what was expected and
    found, and the closest key.
    """
    names = _names(ctx.command)
    found = dict(ctx.params)
    for key, value in configured.ci.items():
        where = f"{configured.path}: [ci] {key}"
        option = names.get(key.replace("_", "-"))
        if option is None:
            raise click.UsageError(_unknown(f"{configured.path}: [ci]", key, names))
        if ctx.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT:
            continue
        given = _placed(option, _typed(option, value, where), configured.path.parent if configured.path else Path())
        try:
            read = option.type_cast_value(ctx, given)
        except (click.BadParameter, ValueError) as error:
            message = error.message if isinstance(error, click.BadParameter) else str(error)
            raise click.UsageError(f"{where}: {message}") from error
        second = f"--{key.replace('_', '-')}" in option.secondary_opts
        found[option.name or ""] = not read if second else read
    return found


def _names(command: click.Command) -> Mapping[str, click.Option]:
    """Return the long names that may stand in the table, without their dashes."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    typed = [(name, option) for option in options for name in (*option.opts, *option.secondary_opts)]
    named = {name.removeprefix("--"): option for name, option in typed if name.startswith("--")}
    return {name: option for name, option in named.items() if name not in _TYPED_ONLY}


def _unknown(where: str, key: str, names: Mapping[str, click.Option]) -> str:
    if key in _TYPED_ONLY or key == "checkpoint":
        return f"{where}: {key!r} is for the command line alone"
    return f"{where}: unknown key {key!r}. {suggestion(key.replace('_', '-'), names)}"


def _typed(option: click.Option, value: object, where: str) -> object:
    """Return the value as the option's type takes it. Raises `click.UsageError` where TOML's type is another."""

    def wrong(expected: str) -> click.UsageError:
        return click.UsageError(f"{where}: expected {expected}, found {value!r}")

    if option.is_flag:
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if isinstance(option.type, click.IntRange):
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong("a whole number")
        return value
    listed = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in listed):
        raise wrong("a list of strings" if option.multiple else "a string")
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
