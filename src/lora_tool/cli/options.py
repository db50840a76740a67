"""Options that several commands have, spelled once."""

from __future__ import annotations

import os
import sys
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


def comma_list(value: str) -> tuple[str, ...]:
    """Return the entries between commas: the type of an option. Raises ValueError where there is none."""
    entries = tuple(entry.strip() for entry in value.split(",") if entry.strip())
    if not entries:
        raise ValueError(value)
    return entries


def wants_colour() -> bool:
    """Return whether stdout is a terminal whose user has not set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
