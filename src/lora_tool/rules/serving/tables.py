"""What servers take, as data: a file for each server, with a record for each version that is known, the newest first.

A record names what it was read from and what it was tried with; `ServingForm` says what its fields mean. An older
version's holds what differs from the newest. `python -m tests.servers.compare` compares the newest with an installed
server.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.json import decode

from lora_tool.core.errors import WrongValue

TABLES = Path(__file__).with_name("tables")


@cache
def table_of(server: str) -> dict[str, Any]:
    """Return the table of a built-in server: its `name`, and its `versions`, the newest first."""
    table: dict[str, Any] = decode((TABLES / f"{server}.json").read_bytes())
    return table


def record_of(server: str, version: str = "") -> dict[str, Any]:
    """Return the record of a version as `known_version` has it, by default of the newest."""
    newest, *older = table_of(server)["versions"]
    return next((newest | each for each in older if each["version"] == version), newest)


def known_version(server: str, version: str) -> str:
    """Return the version itself if there is a record of it, else the nearest one below among its patch releases.

    Two numbers, 0.32, mean the newest patch release. Raises `WrongValue` where there is none, naming those that are known.
    """
    versions = [str(each["version"]) for each in table_of(server)["versions"]]
    wanted = _numbers(version)
    near = [each for each in versions if _series(each) == _series(version) and (_numbers(each) <= wanted)]
    found = next((each for each in versions if is_exactly(version, each)), next(iter(near), None))
    if found is None:
        raise WrongValue(f"version of {server}: expected one of {', '.join(versions)}, found {version!r}")
    return found


def is_exactly(version: str, known: str) -> bool:
    """Return whether a version as it was typed is the known one, or one of its series: 0.32 is 0.32.1."""
    return _numbers(version) in (_numbers(known), _series(known) or None)


def _series(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a release; () for a build, of which all are of one series."""
    return _numbers(version)[:2] if "." in version else ()


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, two or three, or the one of a build, b11549; () if it is neither."""
    found = re.fullmatch(r"b(\d{1,9})|v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", version)
    return tuple(int(number) for number in found.groups() if number) if found else ()
