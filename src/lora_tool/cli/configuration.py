"""`lora-tool.toml`, or `[tool.lora-tool]` of `pyproject.toml`: what a project always asks of the rules, and of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from msgspec import Struct, field

from lora_tool.cli.options import FolderOrId, Timed, UserPath
from lora_tool.core.choices import suggestion
from lora_tool.core.errors import CorruptFile, UnknownRule, WrongValue
from lora_tool.core.progress import decided
from lora_tool.core.report.findings import Ignored, Severity
from lora_tool.core.report.forms import Form
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import is_file, read_text
from lora_tool.rules.engine.registry import expand
from lora_tool.rules.serving.named import server_named

if TYPE_CHECKING:
    from lora_tool.verification.validating import Criteria

FILE_NAME = "lora-tool.toml"
PYPROJECT = "pyproject.toml"
TABLES = ("ci", "merge", "push", "verify")
"""Commands whose options may stand in a table of their own."""
KEYS = ("select", "ignore", "fail-on", "for", "report", "strict", "format", *TABLES)
_MAX_BYTES = 1 << 20
_TYPED_ONLY = frozenset({"config", "help", "json", "quiet", "verbose"})
"""Options that say how one run is shown, and where the configuration is: no table may have them."""
_SAY_THE_SAME = {"task": ("reward",), "reward": ("task", "num_labels")}
"""An option that was typed → those that are not read from the table then."""
_READ = "lora_tool.configuration"


class Configuration(Struct, frozen=True, kw_only=True):
    """What a configuration file sets; options on the command line win, ignores add up."""

    path: Path | None = None
    select: tuple[str, ...] = ()
    ignore: Mapping[str, str | None] = field(default_factory=dict)
    """Code, or beginning of codes → the reason; None where none is given."""
    fail_on: str | None = None
    servers: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    strict: bool | None = None
    form: str | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Command → its options by their names, as they stand in the file."""

    @property
    def criteria(self) -> Criteria:
        """By what `validate` judges where its command line asks for nothing else; strict means to read everything."""
        from lora_tool.verification.validating import Criteria  # all rules, only where they judge

        return Criteria(
            select=self.select,
            ignore=tuple(self.ignore),
            deep=True if self.strict else None,
            servers=frozenset(map(server_named, self.servers)),
        )


class RuleChoice(Struct, frozen=True, kw_only=True):
    """What command line and configuration together ask of the rules."""

    select: tuple[str, ...]
    ignored: tuple[Ignored, ...]
    fail_on: Severity

    @property
    def ignore(self) -> tuple[str, ...]:
        return tuple(ignored.code for ignored in self.ignored)

    def arguments(self) -> dict[str, Any]:
        """Return what `plan_merge` takes."""
        return {"select": self.select, "ignore": self.ignore, "fail_on": self.fail_on}


class _Wrong(click.UsageError):
    """The configuration file cannot be used; exit code 2. The message says where, and what is expected there."""

    hint = None


def configuration(given: str | Path | None, checked: Iterable[str]) -> Configuration:
    """Return the configuration in the file `given`, else the nearest one above the working directory, else none.

    A file inside one of the folders that are `checked` is not trusted unless it was given: a checkpoint must not say
    which of its own faults are ignored. Raises `click.UsageError` for a file that cannot be used.
    """
    if given is not None:
        path = Path(given)
        table = _table(path)
        if table is None:
            raise _Wrong(f"{path} has no table [tool.lora-tool]")
        return _configuration(path, table)
    folders = [Path(os.path.realpath(folder)) for folder in checked]
    for path, table in _nearest(Path.cwd()):
        if not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in folders):
            decided(f"configuration: {path}")
            return _configuration(path, table)
        note = f"note: {path} is ignored because it lies in a folder that is being checked (--config uses it anyway)"
        click.echo(note, err=True)
    return Configuration()


def _nearest(start: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for folder in (start, *start.parents):
        for name in (FILE_NAME, PYPROJECT):
            path = folder / name
            if is_file(path) and (table := _table(path)) is not None:
                yield path, table


def _table(path: Path) -> Mapping[str, Any] | None:
    """Return the settings in the file; None where a pyproject.toml has none."""
    try:
        text = read_text(path, limit=_MAX_BYTES)
    except CorruptFile as error:
        raise _Wrong(str(error)) from error
    if path.name == PYPROJECT and "lora-tool" not in text:
        return None
    if sys.version_info >= (3, 11):
        import tomllib  # most folders have no configuration
    else:
        import tomli as tomllib
    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"{path} is not valid TOML: {error}") from error
    if path.name != PYPROJECT:
        return parsed
    tool = parsed.get("tool", {})
    found = tool.get("lora-tool") if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise _Wrong(f"{path}: tool.lora-tool must be a table")
    return found


def _configuration(path: Path, table: Mapping[str, Any]) -> Configuration:
    fields = Fields(table, path)
    fields.only(KEYS)
    read = Configuration(
        path=path,
        select=_codes(fields, "select", fields.listed("select")),
        ignore=_ignored(fields),
        fail_on=fields.choice("fail-on", (Severity.ERROR.value, Severity.WARNING.value)),
        servers=_servers(fields),
        reports=fields.listed("report"),
        strict=fields.optional_boolean("strict"),
        form=fields.choice("format", [form.value for form in Form]),
        tables={name: fields.inner(name).table for name in TABLES},
    )
    fields.require(_Wrong)
    return read


def _servers(fields: Fields) -> tuple[str, ...]:
    words = fields.listed("for")
    for word in words:
        try:
            server_named(word)
        except WrongValue as error:
            fields.note("for", f"{error}. Did you mean {error.hint}" if error.hint else str(error))
    return words


def _codes(fields: Fields, name: str, codes: Collection[str]) -> tuple[str, ...]:
    try:
        _meant(codes)
    except UnknownRule as error:
        fields.note(name, str(error))
    return tuple(codes)


def _ignored(fields: Fields) -> Mapping[str, str | None]:
    value = fields.table.get("ignore")
    if not isinstance(value, dict):
        return dict.fromkeys(_codes(fields, "ignore", fields.listed("ignore")))
    if not all(isinstance(reason, str) and reason.strip() for reason in value.values()):
        fields.expected("ignore", 'reason for each code, LT215 = "served unmerged"', value)
        return {}
    _codes(fields, "ignore", value)
    return {code: " ".join(reason.split()) for code, reason in value.items()}


def rule_choice(ctx: click.Context, configured: Configuration) -> RuleChoice:
    """Return the rules that were chosen: the command line's before the configuration's, what both ignore together.

    For a command without ``--select`` the configuration's holds. Raises `UnknownRule`.
    """
    options = ctx.params
    reasons = dict.fromkeys(_meant(options["ignore"])) | {
        known: reason for code, reason in configured.ignore.items() for known in _meant([code])
    }
    select = options.get("select") or configured.select
    _meant(select)
    silent = ctx.get_parameter_source("fail_on") in (ParameterSource.DEFAULT, None)
    configured_level = silent and configured.fail_on
    return RuleChoice(
        select=tuple(select),
        ignored=tuple(Ignored(code=code, reason=reason) for code, reason in sorted(reasons.items())),
        fail_on=Severity(configured_level or options["fail_on"]),
    )


def _meant(codes: Collection[str]) -> list[str]:
    """Return the rules that the codes mean. Raises `UnknownRule`."""
    if not codes:
        return []
    import lora_tool.rules.judging  # noqa: F401 - it registers the rules, which only this needs

    return sorted(expand(codes))


# A command's own table, such as `[merge]`: its options by their names, where the command line is silent.


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
    table = configured.tables.get(ctx.command.name or "")
    if not table or configured.path is None:
        return
    names, folder = _names(ctx.command), configured.path.parent
    params = [param.name or "" for param in ctx.command.params]
    typed = {name for name in params if ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)}
    settled = typed.union(*(_SAY_THE_SAME.get(name, ()) for name in typed))
    for key, value in table.items():
        spelled, where = key.replace("_", "-"), f"{configured.path}: [{ctx.command.name}]"
        if spelled not in names:
            raise _Wrong(f"{where}: {_unknown(key, ctx.command, names)}")
        where, option = f"{where} {key}", names[spelled]
        name = option.name or ""
        if name in settled:
            continue
        try:
            read = option.process_value(ctx, _placed(option, _typed(option, value, where), folder))
        except (click.BadParameter, ValueError) as error:
            message = error.message if isinstance(error, click.BadParameter) else str(error)
            raise _Wrong(f"{where}: {message}") from error
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
        raise _Wrong(f"{where}: expected {expected}, found {value!r}")
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
