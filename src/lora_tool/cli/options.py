"""Options that several commands have, spelled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def base_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``--base``: a model's path or Hub id."""
    return click.option("--base", metavar="MODEL", help=help_text)


def json_option(command: Decorated) -> Decorated:
    """Add ``--json``: the result as JSON on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def quiet_option(help_text: str) -> Callable[[Decorated], Decorated]:
    """Add ``-q``: less output; each command says what is left."""
    return click.option("-q", "--quiet", is_flag=True, help=help_text)


class ListType(click.ParamType[tuple[str, ...]]):
    """Entries separated by commas. With `multiple=True` the option may also be given several times."""

    name = "codes"

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        entries = tuple(entry.strip() for entry in value.split(",") if entry.strip())
        if not entries:
            self.fail("names nothing", param, ctx)
        return entries
