"""How names, sizes and tables that come from files are shown to people: nothing in them may act on a terminal or a CI log."""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

_KIB = 1024
_MINUTE = 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


_COMMAND = re.compile(r"\A\s*(::)|(##)(?=\[|vso\[)")
"""What CI runners act on: ``::error::`` at the beginning of a line (GitHub), ``##[…]`` and ``##vso[…]`` anywhere."""


def printable(text: str) -> str:
    """Return `text` as one line of glyphs that acts on nothing.

    Control, bidirectional and unassigned characters are escaped, and the marks of a CI runner's commands.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(c if _harmless(c) else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
    if "::" in text or "##" in text:
        text = _COMMAND.sub(lambda match: match[0].replace("::", r"\x3a\x3a").replace("##", r"\x23\x23"), text)
    return text


def _harmless(character: str) -> bool:
    return character.isprintable() and unicodedata.category(character) not in ("Cf", "Co", "Cs")


_ARGUMENT = re.compile(r"`(?P<name>[a-z_]+)=(?P<value>[^`]*)`")
_SPELLED = {
    "expert_layout": "--moe-b-layout",
    "out": "-o",
    "reward": "--rm",
    "adapters": "--adapter",
    "servers": "--for",
}
"""Arguments whose options are called otherwise."""


def as_options(text: str) -> str:
    """Return `text` as the command line says it: an argument such as ``task="reward"`` in backticks is an option."""

    def option(match: re.Match[str]) -> str:
        name = _SPELLED.get(match["name"]) or f"--{match['name'].replace('_', '-')}"
        value = match["value"].strip('"')
        return name if value == "True" else f"{name} {value}"

    return _ARGUMENT.sub(option, text) if "=" in text else text


_CELL = 90
"""Letters in a cell of a table of several folders."""


def as_cell(text: str) -> str:
    """Return `text` short enough for a cell: all of it stands above the table, or where a folder is shown alone."""
    return shortened(text, _CELL)


def shortened(text: str, longest: int = 1_500) -> str:
    """Return `text` with its middle left out where it is longer than `longest`: a name may be a megabyte."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} […] {text[-half:]}"


def as_html(text: str) -> str:
    """Return lines of text as HTML that acts on nothing, for a notebook."""
    import html  # only in notebooks

    return f"<pre>{html.escape(shortened(text, 20_000))}</pre>"


def size(nbytes: int) -> str:
    """Return a number of bytes in binary units with three significant digits: ``1.38 GiB``."""
    value, unit = float(nbytes), _UNITS[0]
    for unit in _UNITS:
        if value < _KIB or unit == _UNITS[-1]:
            break
        value /= _KIB
    return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}" if value < _KIB - 1 else f"{value:.0f} {unit}"


def number(value: float | None, *, none: str = "-") -> str:
    """Return three significant digits: ``0.490``, ``12.3``, ``1.20e-05``."""
    if value is None:
        return none
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    return "0" if value == 0 else f"{value:#.3g}".removesuffix(".")


def four_digits(value: float | None) -> str:
    """Return four significant digits, without zeros at the end."""
    return number(value) if value is None or not math.isfinite(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time as people say it: ``12.3 s``, ``2 min 5 s``, ``1 h 2 min``."""
    if round(seconds) < _MINUTE:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE)
    return f"{minutes} min {rest} s" if minutes < _MINUTE else f"{minutes // _MINUTE} h {minutes % _MINUTE} min"


def from_here(path: Path) -> Path:
    """Return a path as it is typed from the working directory, if it lies in it; any other as it is."""
    try:
        here = path.relative_to(Path.cwd()) if path.is_absolute() else path
    except (ValueError, OSError):
        return path
    return path if str(here).startswith("-") else here  # which a command would take for an option


def counted(n: int, what: str) -> str:
    """Return how many there are, in words: "1 file", "2,048 files", "no files"."""
    return f"{f'{n:,}' if n else 'no'} {what}{'' if n == 1 else 's'}"


def and_more(rest: int) -> str:
    """Return the end of a list that is cut short, " and 3 more"; "" where nothing is left out."""
    return f" and {rest} more" if rest > 0 else ""


def named(names: Sequence[str], most: int = 4) -> str:
    """Return the first of the names in backticks, and how many more there are: "`lm_head` and 3 more"."""
    return ", ".join(f"`{name}`" for name in names[:most]) + and_more(len(names) - most)


def some(items: Collection[object], most: int = 8) -> str:
    """Return the first of the items with commas between, and dots where there are more than `most`."""
    return ", ".join(map(str, itertools.islice(items, most))) + (", …" if len(items) > most else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with neighbours joined: ``0-3, 5, 8-11``; what is too irregular to read is cut."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] + 1 == n:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    listed = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(listed[:4] + (["…"] if len(listed) > 4 else [])) or "-"  # noqa: PLR2004 - fits its column


def finite(value: float | None) -> float | None:
    """Return the number, None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def json_data(value: object) -> Any:  # noqa: ANN401 - JSON data
    """Return records and what they hold as JSON data: names from files escaped, NaN and infinities null."""
    if isinstance(value, dict):
        return {printable(str(key)): json_data(inner) for key, inner in value.items()}
    if isinstance(value, Struct):
        return {name: json_data(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [json_data(inner) for inner in value]
    if isinstance(value, float):
        return finite(value)
    return printable(str(value)) if isinstance(value, str | Path) else value


_encoded = json.JSONEncoder(allow_nan=False, check_circular=False).encode
"""`json.dumps`, which would make an encoder for each call."""


def json_text(value: object, *, spread: int, indent: str = "") -> str:
    """Return JSON with a line for each entry of the outer `spread` levels; what is deeper is on its entry's line.

    For tables of many thousand entries: `json` indents in Python, which takes seconds, and encodes a line in C.
    """
    if not spread or not isinstance(value, dict | list) or not value:
        return _encoded(value)
    inner = f"{indent}  "
    if isinstance(value, dict):
        entries = [f"{_encoded(k)}: {json_text(v, spread=spread - 1, indent=inner)}" for k, v in value.items()]
    else:
        entries = [json_text(entry, spread=spread - 1, indent=inner) for entry in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    joined = f",\n{inner}".join(entries)
    return f"{first}\n{inner}{joined}\n{indent}{last}"
