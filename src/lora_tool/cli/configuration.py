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

from lora_tool.core.errors import CorruptFile, UnknownRule
from lora_tool.core.progress import decided
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.forms import Form
from lora_tool.core.report.words import Ignored
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import is_file, read_text
from lora_tool.rules.engine.registry import expand
from lora_tool.rules.serving.named import known_servers, server_named

if TYPE_CHECKING:
    from lora_tool.verification.validating import Criteria

FILE_NAME = "lora-tool.toml"
PYPROJECT = "pyproject.toml"
TABLES = ("ci", "merge", "push", "verify")
"""Commands whose options may stand in a table of their own."""
KEYS = ("select", "ignore", "fail-on", "for", "report", "strict", "format", *TABLES)
_MAX_BYTES = 1 << 20


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
    """The configuration file cannot be used; exit code 2."""


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
        servers=fields.listed("for", known_servers() if "for" in table else ()),
        reports=fields.listed("report"),
        strict=fields.optional_boolean("strict"),
        form=fields.choice("format", [form.value for form in Form]),
        tables={name: fields.inner(name).table for name in TABLES},
    )
    fields.require(_Wrong)
    return read


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
