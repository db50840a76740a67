"""Injuring one file of a folder in a way that its format may not expect, as a `Choices` decides."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.choices import Choices

NASTY = "\x1b]0;owned\x07\r\n::error file=x::boom\u202egnp.exe\x9b31m\0\u2028"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 0.0, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), float("-inf"), "", " ", "0", "8", "LORA", "lora", "SEQ_CLS", "all-linear", ".*", "(a+)+$", "(", "[",
    "a" * 5000, "\ud800", NASTY, "../../etc/passwd", "/etc/passwd", "x\0y", "C:\\x", ".", "..", [], [[]], [None], [1],
    [-1], ["q_proj"], ["q_proj", 1], [""], [2**70], [NASTY], {}, {"": 1}, {"a": None}, {"q_proj": 8}, {"q_proj": "8"},
    {"q_proj": float("nan")}, {".*": 2}, {"(": 2}, {NASTY: NASTY}, {"0": "LABEL_0"}, [{}], {"a": {"b": {"c": []}}},
)  # fmt: skip
"""What a field of a JSON file may hold instead of what was expected."""

LITERALS = (b"9" * 5000, b"[" * 3000, b"1e400", b"-", b"NaN", b'"\\ud800"', b'{"a":1,"a":2}', b"", b"\xff", b"0x1")
"""What no JSON writer makes, put in place of a value."""
_PLACE = "\x00place\x00"


def injure(folder: Path, choices: Choices) -> str:
    """Change one file in or under the folder, and return in words what was done to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    path = choices.pick(files)
    fitting = [way for suffixes, way in _WAYS if path.suffix in suffixes or path.name in suffixes]
    way = choices.pick((*fitting, *fitting, *_ANY))
    way(path, choices)
    return f"{path.relative_to(folder)}: {way.__name__}"


def _json(path: Path, choices: Choices) -> None:
    try:
        text = edited(path.read_bytes(), choices)
    except ValueError:
        return _bytes(path, choices)
    return _write(path, text)


def edited(text: bytes, choices: Choices) -> bytes:
    """Return JSON text with one value replaced, removed, doubled or added. Raises ValueError where it is no JSON."""
    try:
        table = json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply to edit") from error
    holder, key = _place(table, choices)
    if holder is None:
        return json.dumps(choices.pick(VALUES)).encode()
    what = choices.below(8)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        holder[choices.pick([v for v in VALUES if isinstance(v, str)])] = choices.pick(VALUES)
    elif what == 2:
        holder[key] = _PLACE
        return json.dumps(table).encode().replace(json.dumps(_PLACE).encode(), choices.pick(LITERALS))
    elif what == 3 and isinstance(holder, dict):
        holder[choices.pick([v for v in VALUES if isinstance(v, str)])] = holder.pop(key)
    else:
        holder[key] = choices.pick(VALUES)
    return json.dumps(table).encode()


def _place(table: Any, choices: Choices) -> tuple[Any, Any]:
    """Return a container in the JSON value and one of its keys; (None, None) where it has none."""
    places = [(table, key) for key in _keys(table)]
    if not places:
        return None, None
    holder, key = choices.pick(places)
    while _keys(holder[key]) and choices.below(3):
        holder = holder[key]
        key = choices.pick(_keys(holder))
    return holder, key


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def _header(path: Path, choices: Choices) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        text = edited(data[8 : 8 + length], choices)
    except ValueError:
        return _bytes(path, choices)
    return _write(path, len(text).to_bytes(8, "little") + text + data[8 + length :])


def _archive(path: Path, choices: Choices) -> None:
    """Change a member of a torch file, keeping the archive whole."""
    try:
        with zipfile.ZipFile(path) as old:
            members = [(info, old.read(info)) for info in old.infolist()]
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError):
        return _bytes(path, choices)
    pickles = [at for at, (info, _) in enumerate(members) if info.filename.endswith(".pkl")]
    at = choices.pick(pickles) if pickles and choices.below(4) else choices.below(len(members))
    info, data = members[at]
    change = repickled if at in pickles and choices.below(4) else changed
    members[at] = (info, change(data, choices))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        for info, content in members:
            new.writestr(info.filename, content)
    return _write(path, buffer.getvalue())


PUSHES = (
    b"N", b"\x88", b"K\x00", b"K\x03", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\xff" + b"\x7f" * 255,
    b"G\x7f\xf8" + bytes(6), b"G\x7f\xf0" + bytes(6), b"X\x00\x00\x00\x00", b"X\x03\x00\x00\x00a\nb", b"X\x03\x00\x00\x00\xed\xa0\x80",
    b"]", b"}", b")", b"]q\xf0h\xf0a", b"}q\xf0(h\xf0Nu0h\xf0", b"}q\xf0K\x01h\xf0s", b"cos\nsystem\n", b"cos\nsystem\n)R",
    b"cos\nsystem\n)R}X\x01\x00\x00\x00ah\xf0sb", b"]K\x01\x85a", b"K\x01\x85", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86",
    b"ctorch\nfloat32\n", b"ctorch\nSize\n)R", b"}X\x01\x00\x00\x00aK\x01s", b"]]a",
    b"K\x01\x85q\xf0" + b"h\xf0h\xf0\x86q\xf0" * 40 + b"h\xf0",
)  # fmt: skip
"""Instructions that put one object on a pickle's stack: of every type, cyclic, and of exponential size when printed."""


def repickled(data: bytes, choices: Choices) -> bytes:
    """Return the pickle with the object that stands on top of the stack somewhere in it taken for another one."""
    try:
        ends = [at for _, _, at in pickletools.genops(data) if at is not None][1:]
    except ValueError:
        return changed(data, choices)
    at = choices.pick(ends)
    return data[:at] + b"0" + choices.pick(PUSHES) + data[at:]


def _metadata(path: Path, choices: Choices) -> None:
    _write(path, repickled(path.read_bytes(), choices))


def _bytes(path: Path, choices: Choices) -> None:
    _write(path, changed(path.read_bytes(), choices))


def changed(data: bytes, choices: Choices) -> bytes:
    """Return `data` with a byte changed, a piece cut out, doubled, overwritten or put in, or cut short."""
    at = choices.below(len(data) + 1)
    piece = min(choices.below(64), len(data) - at)
    match choices.below(6):
        case 0:
            return data[:at] + choices.bytes(1) + data[at + 1 :]
        case 1:
            return data[:at] + data[at + piece :]
        case 2:
            return data[:at] + data[at : at + piece] * 2 + data[at + piece :]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + choices.bytes(piece) + data[at + piece :]
        case _:
            return data[:at] + choices.bytes(choices.below(16)) + data[at:]


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _gone(path: Path, _: Choices) -> None:
    path.unlink()


def _another(path: Path, choices: Choices) -> None:
    """Put something that is no plain file in its place."""
    path.unlink()
    what = choices.pick(("folder", "fifo", "nowhere", path.name, "/dev/zero", "/proc/self/mem", "."))
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(what)


def _renamed(path: Path, choices: Choices) -> None:
    names = (
        b"x\xff.safetensors",
        b"model-00001-of-00001.safetensors",
        b"config.json",
        b"::error::x\n",
        b"checkpoint-9",
    )
    with contextlib.suppress(IsADirectoryError):  # an earlier injury made a folder of that name
        path.rename(path.parent / os.fsdecode(choices.pick(names)))


def _swapped(path: Path, choices: Choices) -> None:
    """Give it the content of another file of its folder."""
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and not other.is_symlink())
    _write(path, choices.pick(others).read_bytes())


_WAYS: tuple[tuple[tuple[str, ...], Callable[[Path, Choices], None]], ...] = (
    ((".json",), _json),
    ((".safetensors",), _header),
    ((".pt", ".pth", ".bin", ".distcp"), _archive),
    ((".metadata",), _metadata),
)
_ANY: tuple[Callable[[Path, Choices], None], ...] = (_bytes, _bytes, _gone, _another, _renamed, _swapped)
