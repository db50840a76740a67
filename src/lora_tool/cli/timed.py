"""Commands that may take long, and say at their end how long they took."""

from __future__ import annotations

import time
from typing import Any

import click

from lora_tool.core.display import duration

LONG = 5.0
"""Seconds from which on somebody has waited, and wants to know how long."""


class Timed(click.Command):
    """A command that says on stderr how long it took, where that was long and it may say something."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        """Run the command."""
        begun = time.monotonic()
        done = super().invoke(ctx)
        seconds = time.monotonic() - begun
        if seconds >= LONG and not ctx.params.get("quiet") and not ctx.params.get("as_json"):
            click.echo(f"took {duration(seconds)}", err=True)
        return done
