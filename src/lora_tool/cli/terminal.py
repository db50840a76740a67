"""Saying something to a person: in colour where that is wanted, and so that no name from a file acts on a terminal."""

from __future__ import annotations

import os
import sys

import click

from lora_tool.display import printable, shortened
from lora_tool.errors import LoraToolError

_COLOURS = {"error": "red", "warning": "yellow", "hint": "cyan"}


def wants_colour() -> bool:
    """Return whether stdout is a terminal whose user has not set NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def tell(label: str, text: str) -> None:
    """Write ``label: text`` to stderr as one line: a line break in it could start a CI system's command."""
    styled = click.style(f"{label}:", fg=_COLOURS.get(label), bold=label == "error")
    colour = False if os.environ.get("NO_COLOR") else None
    try:
        click.echo(f"{styled} {shortened(printable(text))}", err=True, color=colour)
    except OSError:
        # nobody can be told, and the work goes on; what is left in the buffer must not fail when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def warn(text: str) -> None:
    """Write a warning to stderr."""
    tell("warning", text)


def show_error(error: LoraToolError) -> None:
    """Write the error and its hint to stderr."""
    tell("error", str(error))
    if error.hint:
        tell("hint", error.hint)
