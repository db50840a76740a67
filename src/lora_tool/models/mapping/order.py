"""The order in which transformers goes through the names of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterable

_DIGITS = "0123456789"


def in_natural_order(names: Iterable[str]) -> list[str]:
    """Return the names in the order in which transformers goes through them, which is that of its `dot_natural_key`.

    The key of a name is the keys of its parts, and a hundred thousand names are made of a thousand parts: those are put
    in order, and then only their places are compared.
    """
    parts = {name: name.split(".") for name in names}
    keys = {part: _key(part) for part in {part for each in parts.values() for part in each}}
    order = {key: place for place, key in enumerate(sorted(set(keys.values())))}
    places = {part: order[key] for part, key in keys.items()}
    return sorted(parts, key=lambda name: [places[part] for part in parts[name]])


def _key(part: str) -> tuple[bool, str, int, str]:
    """Return the key of a part: numbers before texts, and the number at the end of a text as a number of any length."""
    text = part.rstrip(_DIGITS)
    number = part[len(text) :]
    figures = number.lstrip("0")
    return bool(text) or not number, text, len(figures) if number else -1, figures
