"""How names and sizes that come from files are shown to people: nothing in them may act on a terminal or a CI log."""

from __future__ import annotations

import unicodedata

_KIB = 1024
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """Return `text` with control, bidirectional and unassigned characters escaped, so that it is one line of glyphs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _harmless(c) else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def _harmless(character: str) -> bool:
    return character.isprintable() and unicodedata.category(character) not in ("Cf", "Co", "Cs")


def size(nbytes: int) -> str:
    """Return a number of bytes in binary units with three significant digits: ``1.38 GiB``."""
    value, unit = float(nbytes), _UNITS[0]
    for unit in _UNITS:
        if value < _KIB or unit == _UNITS[-1]:
            break
        value /= _KIB
    return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}" if value < _KIB - 1 else f"{value:.0f} {unit}"
