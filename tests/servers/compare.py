"""Compares what the table of a server says with an installed one: `python -m tests.servers.compare SERVER --python PATH`.

PATH is the Python that has the server; `ask_….py` runs there and prints a record. What cannot be read off a server stays
in the table as it was written. Prints the differences, and exits with 1 if there are any. `--write` puts the record into
the table: in place of that of the same version, or, for another version, as a new record, not yet tried.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.serving.tables import TABLES, known_version, record_of

ROOT = Path(__file__).parents[2]
WIDTH = 118


def asked(server: Server, python: str) -> dict[str, Any]:
    """Return what the server of this Python says: its `record`, and its `options`."""
    asking = [python, "-m", f"tests.servers.ask_{server.name.lower()}"]
    done = subprocess.run(asking, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def differences(table: Any, server: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each part of a record that is another in the server."""
    if isinstance(server, dict) and isinstance(table or {}, dict):
        table = table or {}
        for name in sorted(server.keys() if path == "fields" else table.keys() | server.keys()):
            yield from differences(table.get(name), server.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(table, list) and isinstance(server, list) and {type(each) for each in table + server} <= {str}:
        yield from (f"{path}: only the table has {name}" for name in table if name not in server)
        yield from (f"{path}: only the server has {name}" for name in server if name not in table)
    elif table != server:
        yield f"{path}: the table says {json.dumps(table)}, the server {json.dumps(server)}"


def unknown_options(record: Mapping[str, Any], options: list[str]) -> Iterator[str]:
    """Yield a line for each option of the table's commands that the server does not have."""
    for option in re.findall(r"--[\w-]+", f"{record.get('start', '')} {record.get('towers', '')}"):
        if options and option not in options:
            yield f"start: the server has no option {option}"


def write(server: Server, record: dict[str, Any]) -> None:
    """Put a record into the server's table; an older version's is what differs from the newest."""
    path = TABLES / f"{server}.json"
    table = json.loads(path.read_bytes())
    newest, *older = table["versions"]
    whole = [newest, *({**newest, **each} for each in older)]
    record = record | {"fields": _fields(newest, record)}
    same = next((each for each in whole if each["version"] == record["version"]), None)
    others = [each for each in whole if each is not same]
    whole = sorted([*others, (same or newest | {"run": ""}) | record], key=_numbers, reverse=True)
    first = whole[0]
    table["versions"] = [first, *({n: v for n, v in each.items() if v != first.get(n)} for each in whole[1:])]
    path.write_text(f"{shown(table)}\n", encoding="utf-8")


def _fields(known: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, str]:
    """Return the reactions that a server shows, and those that only the table knows; None is no reaction."""
    fields = {**known.get("fields", {}), **record["fields"]}
    return {name: reaction for name, reaction in sorted(fields.items()) if reaction is not None}


def _numbers(record: Mapping[str, Any]) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", record["version"])]


def shown(value: object, indent: int = 0) -> str:
    """Return JSON with lists of strings in full lines, for they hold hundreds of names."""
    margin, inner = " " * indent, " " * (indent + 2)
    flat = json.dumps(value, ensure_ascii=False)
    nested = any(isinstance(each, dict | list) for each in value.values()) if isinstance(value, dict) else True
    if isinstance(value, dict) and value and (nested or len(flat) + indent > WIDTH - 20):
        parts = (f"{inner}{json.dumps(key)}: {shown(each, indent + 2)}" for key, each in value.items())
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return "[\n" + ",\n".join(f"{inner}{shown(each, indent + 2)}" for each in value) + f"\n{margin}]"
    if not isinstance(value, list) or len(flat) + indent < WIDTH - 20:
        return flat
    return "[\n" + ",\n".join(f"{inner}{line}" for line in _lines(value, WIDTH - indent)) + f"\n{margin}]"


def _lines(names: list[str], width: int) -> Iterator[str]:
    line: list[str] = []
    for name in map(json.dumps, names):
        if line and len(", ".join([*line, name])) > width - 3:
            yield ", ".join(line)
            line = []
        line.append(name)
    yield ", ".join(line)


def main() -> int:
    """Return 1 if table and server differ, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", type=Server, choices=list(Server))
    parser.add_argument("--python", default=sys.executable, help="the Python that has the server")
    parser.add_argument("--write", action="store_true", help="put what the server says into the table")
    chosen = parser.parse_args()
    found = asked(chosen.server, chosen.python)
    version = found["record"]["version"]
    if chosen.write:
        write(chosen.server, found["record"])
    try:
        known = known_version(chosen.server, version)
    except ValueError as error:
        print(f"{error}: compared with the newest")
        known = ""
    record = record_of(chosen.server, known)
    lines = [
        *differences({name: record.get(name) for name in found["record"]}, found["record"]),
        *unknown_options(record, found.get("options", [])),
    ]
    print("\n".join(lines or [f"{chosen.server} {version}: the table says the same"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
