"""The changes of fixes: fields of a JSON file, or names in the header of a weights file; and their diffs."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from lora_tool.core.choices import assert_never
from lora_tool.core.errors import CorruptFile
from lora_tool.formats.files import MAX_JSON_BYTES, open_regular, parse_json, read_all, read_at
from lora_tool.formats.safetensors import scan_file

_LENGTH_BYTES = 8
_STYLES = tuple(itertools.product((2, 4, None, 1, "\t"), (False, True)))
"""Indentations and whether all is ASCII: as programs write JSON."""


class FieldChange(Struct, frozen=True, kw_only=True):
    """A field of a JSON file, by its path in it, and the value that it gets."""

    path: Path
    keys: tuple[str, ...]
    value: Any


class NameChange(Struct, frozen=True, kw_only=True):
    """Another name for a tensor of a safetensors file. Its bytes, and those of all others, stay where they are."""

    path: Path
    old: str
    new: str


Change: TypeAlias = FieldChange | NameChange


class FileDiff(Struct, frozen=True, kw_only=True):
    """A rewrite of the beginning of one file, which is `size` bytes long before: `new` replaces `old`.

    `diff` is a unified diff of the file; of a weights file, of the names in its header. `codes` are the rules whose
    findings it answers.
    """

    path: Path
    size: int
    old: bytes
    new: bytes
    diff: tuple[str, ...]
    codes: tuple[str, ...]


def file_changes(changes: Iterable[tuple[str, Change]]) -> tuple[FileDiff, ...]:
    """Return the changes by file, each given with the code of its rule. Raises `CorruptFile` for what cannot be read.

    Names that do not fit into the header that is there, or that the file has already, are left as they are: then every
    byte of the weights would have to move.
    """
    by_file: dict[Path, list[tuple[str, Change]]] = {}
    for code, change in changes:
        by_file.setdefault(change.path, []).append((code, change))
    made = (_changed(path, entries) for path, entries in by_file.items())
    return tuple(change for change in made if change is not None and change.old != change.new)


def _changed(path: Path, entries: Sequence[tuple[str, Change]]) -> FileDiff | None:
    codes = tuple(dict.fromkeys(code for code, _ in entries))
    fields: list[FieldChange] = []
    names: dict[str, str] = {}
    for _, change in entries:
        match change:
            case FieldChange():
                fields.append(change)
            case NameChange(old=old, new=new):
                names[old] = new
            case other:
                assert_never(other)
    return _renamed(path, names, codes) if names else _edited(path, fields, codes)


def _edited(path: Path, fields: Sequence[FieldChange], codes: tuple[str, ...]) -> FileDiff:
    """Return the JSON file with other fields, written as it is written now."""
    old = read_all(path, limit=MAX_JSON_BYTES)
    text = old.decode()
    table, before = parse_json(old, path), parse_json(old, path)
    for field in fields:
        *outer, last = field.keys
        inside = table
        for key in outer:
            inside = inside[key]
        inside[last] = field.value
    new = _as_written(table, text, like=before)
    lines = _diff(path, text.splitlines(), new.splitlines())
    return FileDiff(path=path, size=len(old), old=old, new=new.encode(), diff=lines, codes=codes)


def _as_written(table: Mapping[str, Any], text: str, *, like: Mapping[str, Any]) -> str:
    """Return the table as JSON in the style of `text`, which holds `like`: the diff shows only changed fields."""
    end = text[len(text.rstrip()) :]
    styles: list[dict[str, Any]] = [{"indent": indent, "ensure_ascii": ascii_only} for indent, ascii_only in _STYLES]
    known = (style for style in styles if json.dumps(like, **style) == text.rstrip())
    style = next(known, {"indent": 2, "ensure_ascii": True})  # JSON may hold half a letter, which UTF-8 cannot
    names = list(like)
    written = dict(sorted(table.items())) if names == sorted(names) else table
    return json.dumps(written, **style) + end


def _renamed(path: Path, names: Mapping[str, str], codes: tuple[str, ...]) -> FileDiff | None:
    """Return the weights file with other names in a header of the same length, None where they do not fit into it."""
    with open_regular(path) as fd:
        length = int.from_bytes(read_at(path, fd, 0, _LENGTH_BYTES), "little")
        old = read_at(path, fd, 0, _LENGTH_BYTES + length)
    scanned = scan_file(path)
    if scanned.problems or scanned.data_start != len(old):
        return None
    header: dict[str, Any] = parse_json(old[_LENGTH_BYTES:], path)
    renamed = {names.get(name, name): entry for name, entry in header.items()}
    text = json.dumps(renamed, ensure_ascii=False, separators=(",", ":")).encode()
    if len(renamed) != len(header) or len(text) > length:
        return None
    lines = _diff(path, list(header), list(renamed))
    new = old[:_LENGTH_BYTES] + text.ljust(length)
    return FileDiff(path=path, size=scanned.stamp.size, old=old, new=new, diff=lines, codes=codes)


def _diff(path: Path, old: list[str], new: list[str]) -> tuple[str, ...]:
    return tuple(difflib.unified_diff(old, new, str(path), str(path), lineterm="", n=1))


def may_change(path: Path) -> bool:
    """Return whether the file is one of its folder, and not a link to somewhere: to the Hub's cache, say."""
    try:
        with open_regular(path):
            return not path.is_symlink()
    except CorruptFile:
        return False
