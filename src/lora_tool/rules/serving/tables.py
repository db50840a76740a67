"""What servers take, as data: a file for each server, with a record for each version that is known, the newest first.

A record names what it was read from and what it was tried with; `ServingForm` says what its fields mean.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from msgspec.json import decode

TABLES = Path(__file__).with_name("tables")


@cache
def table_of(server: str) -> dict[str, Any]:
    """Return the table of a built-in server: its `name`, and its `versions`, the newest first."""
    table: dict[str, Any] = decode((TABLES / f"{server}.json").read_bytes())
    return table
