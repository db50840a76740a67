"""Open files of unknown origin: only regular files, only inside their folder, only up to a size."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_tool.core.errors import BadConfig, CorruptFile, Defect

MAX_JSON_BYTES = 100_000_000
"""A config is a few KB, the largest published `tokenizer.json` about 35 MB, a weight index of 90,000 names 10 MB."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill", ".metadata")
"""Ends of the names of files that programs unpickle."""
_PIECE = 1 << 20
MOST_PER_CALL = 1 << 30
"""Bytes per system call: macOS refuses 2 GiB in one, Linux transfers only a part."""
_ROWS_PER_CALL = 1024
"""What Linux and macOS take in one call (`IOV_MAX`)."""


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Yield a read-only descriptor of the regular file `path`. Raises as `opened_regular`."""
    fd = opened_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


def opened_regular(path: Path) -> int:
    """Return a read-only descriptor of the regular file `path`, for the caller to close.

    A FIFO, device or folder raises `CorruptFile` at once instead of blocking; so does an unreadable file.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CorruptFile.of(path, Defect.NOT_A_FILE, f"cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptFile.of(path, Defect.NOT_A_FILE, "is not a regular file")
    return fd


def way_to_open(path: str, message: str) -> str | None:
    """Return the command that makes a file readable which the user may not read, as the `message` says; else None."""
    return f"chmod u+r {shlex.quote(path)}" if message.endswith(os.strerror(errno.EACCES)) else None


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with the home folder for its `~`; as it is where nobody lives, for which `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def is_file(path: Path) -> bool:
    """Return whether a regular file is there; not where a folder may not be entered, for which `Path.is_file` raises."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Return whether a folder is there; not where one above it may not be entered, for which `Path.is_dir` raises."""
    return os.path.isdir(path)  # noqa: PTH112


def read_at(path: Path, fd: int, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of the descriptor `fd` of `path` from `offset`; fewer only where the file ends.

    One call may give less than there is: network file systems do. Raises `OSError` with the file's name.
    """
    pieces = []
    with _Naming(path):
        while nbytes > 0 and (piece := os.pread(fd, min(nbytes, MOST_PER_CALL), offset)):
            pieces.append(piece)
            offset, nbytes = offset + len(piece), nbytes - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_into(path: Path, fd: int, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` as `read_at` reads, and return how many bytes there were. Raises `OSError` with the file's name."""
    done = 0
    with _Naming(path):
        while done < len(buffer):
            part = buffer[done : done + MOST_PER_CALL]
            if hasattr(os, "preadv"):
                count = os.preadv(fd, [part], offset + done)
            else:
                piece = os.pread(fd, len(part), offset + done)
                count = len(piece)
                part[:count] = piece
            if count == 0:
                break
            done += count
    return done


def read_pieces(path: Path, fd: int, pieces: Iterable[tuple[int, memoryview]]) -> int | None:
    """Fill each buffer from its offset as `read_into` does; return where the file ended before one was full, if it did.

    There may be thousands of a few KB, most of them read by one system call.
    """
    read = getattr(os, "preadv", None)
    with _Naming(path):
        for offset, buffer in pieces:
            if read is None or read(fd, (buffer,), offset) < len(buffer):
                done = read_into(path, fd, offset, buffer)
                if done < len(buffer):
                    return offset + done
    return None


def read_rows(path: Path, fd: int, offset: int, rows: Sequence[memoryview]) -> int:
    """Fill all of the `rows`, one after the other, as `read_into` fills one, in few system calls.

    Return how many bytes there were.
    """
    if len(rows) == 1:
        return read_into(path, fd, offset, rows[0])
    done, at, inside = 0, 0, 0
    with _Naming(path):
        while at < len(rows):
            some = [rows[at][inside:], *rows[at + 1 : at + _ROWS_PER_CALL]]
            count = os.preadv(fd, some, offset + done) if hasattr(os, "preadv") else 0
            count = count or read_into(path, fd, offset + done, some[0])
            if count == 0 and len(some[0]):
                break
            done += count
            while at < len(rows) and inside + count >= len(rows[at]):
                count -= len(rows[at]) - inside
                at, inside = at + 1, 0
            inside += count
    return done


class _Naming:
    """Gives an OSError inside the file's name. As a generator it would take a third of a small read's time."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            error.filename = error.filename or str(self._path)


def instead_of_weights(beginning: bytes) -> str | None:
    """Return how a file's first 16 bytes show a failed download, as the end of a sentence; None for other files."""
    if beginning.startswith(b"version https://"):
        return "is the pointer that git leaves where Git LFS is not installed, not the file: git lfs pull"
    if beginning.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "is a web page, not the file: the server sent it in place of the download"
    return None


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON is anything until it is typed
    """Return the parsed JSON file. Raises `CorruptFile`: unreadable, too large, not JSON, too deep, duplicate keys."""
    return parse_json(read_all(path, limit=MAX_JSON_BYTES, too_large=Defect.BAD_JSON), path)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file. Raises as `read_json`, and `BadConfig` where it holds something else."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise BadConfig.of(path, Defect.BAD_FIELD, "expected a JSON object")
    return raw


def read_all(path: Path, *, limit: int, too_large: Defect = Defect.NOT_A_FILE) -> bytes:
    """Return the content of a regular file. Raises `CorruptFile`: unreadable, or `too_large` beyond `limit` bytes."""
    with open_regular(path) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CorruptFile.of(path, too_large, f"is {size:,} bytes, more than the {limit:,} that lora-tool reads")
        return read_at(path, fd, 0, size)


def json_bytes(table: Mapping[str, Any], *, indent: int, sort_keys: bool = False) -> bytes:
    """Return the table as JSON in UTF-8, and in ASCII where UTF-8 cannot hold it: with half a surrogate pair.

    JSON has such a half as an escape, and Python has it in paths that are not UTF-8 (`os.fsdecode`).
    """
    text = io.StringIO()  # `json.dumps` holds every piece of it until the last
    text.writelines(json.JSONEncoder(indent=indent, sort_keys=sort_keys, ensure_ascii=False).iterencode(table))
    try:
        return f"{text.getvalue()}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(table, indent=indent, sort_keys=sort_keys)}\n".encode()


def json_records(table: Mapping[str, Any]) -> bytes:
    """Return the table as `json_bytes` does with an indent of one, but each object of a list in a line of its own.

    json indents in Python, which takes ten times as long as its compiled encoder.
    """
    try:
        return _records(table, ascii_only=False).encode()
    except UnicodeEncodeError:
        return _records(table, ascii_only=True).encode()


def _records(table: Mapping[str, Any], *, ascii_only: bool) -> str:
    line = json.JSONEncoder(ensure_ascii=ascii_only).encode
    entries = []
    for name, value in table.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            text = "[\n  " + ",\n  ".join(map(line, value)) + "\n ]"
        else:  # no text has a line break of its own, which JSON escapes
            text = json.dumps(value, indent=1, ensure_ascii=ascii_only).replace("\n", "\n ")
        entries.append(f"{line(name)}: {text}")
    return "{\n " + ",\n ".join(entries) + "\n}\n"


def parse_json(data: bytes, path: Path) -> Any:  # noqa: ANN401 - JSON is anything until it is typed
    """Return `data`, found in `path`, as parsed JSON. Raises `CorruptFile`, with `subject` the repeated key if any."""
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            repeated.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return table

    marked = _marked(data)
    if marked:
        raise CorruptFile.of(path, Defect.BAD_JSON, marked)
    try:
        parsed = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8 and integers of absurd length
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise CorruptFile.of(path, Defect.BAD_JSON, reason) from error
    if repeated:
        message = f"key appears more than once ({len(repeated)} repeated)" if len(repeated) > 1 else "key appears twice"
        raise CorruptFile.of(path, Defect.DUPLICATE_KEY, message, repeated[0])
    return parsed


BYTE_ORDER_MARK = "begins with a byte order mark, so PEFT and transformers cannot read it"


def _marked(data: bytes) -> str | None:
    """Return the fault in the encoding of a file with this beginning, as editors on Windows cause it; else None."""
    if data.startswith(b"\xef\xbb\xbf"):
        return BYTE_ORDER_MARK
    return "is UTF-16, but JSON files are UTF-8" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else None


def parse_names(data: bytes, path: Path) -> Any:  # noqa: ANN401 - JSON is anything until it is typed
    """Return the same as `parse_json`, for a table with many thousand names in half the time. Raises the same errors.

    Each pair of key and value has a colon, and so does a pair whose key appears again, which Python leaves out. Where
    there are as many colons as pairs, none was left out.
    """
    try:
        parsed: Any = json.loads(data.decode())
    except (ValueError, RecursionError):
        return parse_json(data, path)
    inner = parsed.values() if isinstance(parsed, dict) else ()
    pairs = len(inner) + sum(len(each) for each in inner if isinstance(each, dict))
    return parsed if data.count(b":") == pairs else parse_json(data, path)


def read_text(path: Path, *, limit: int) -> str:
    """Return the text of a file. Raises `CorruptFile`: unreadable, more than `limit` bytes, not UTF-8."""
    try:
        return read_all(path, limit=limit).decode()
    except UnicodeDecodeError as error:
        raise CorruptFile.of(path, Defect.NOT_A_FILE, "is not UTF-8") from error


def broken_json(path: Path) -> str | None:
    """Return the fault of a JSON file, None for a good one. Of a large file only the two ends are read."""
    try:
        with open_regular(path) as fd:
            size = os.fstat(fd).st_size
            if size > _PIECE:
                first = read_at(path, fd, 0, 64)
                ends = first.lstrip()[:1] + read_at(path, fd, size - 64, 64).rstrip()[-1:]
                wrong = None if ends == b"{}" else "does not begin and end like a JSON object: truncated?"
                return _marked(first) or wrong
        parsed = read_json(path)
    except CorruptFile as error:
        return error.problem.message
    return None if isinstance(parsed, dict) else "is not a JSON object"


def same_content(first: Path, second: Path) -> bool:
    """Return whether two regular files hold the same bytes; read a megabyte at a time. Raises `CorruptFile`."""
    with open_regular(first) as one, open_regular(second) as other:
        size, at = os.fstat(one).st_size, 0
        if size != os.fstat(other).st_size:
            return False
        while at < size:
            piece = read_at(first, one, at, _PIECE)
            if piece != read_at(second, other, at, _PIECE):
                return False
            at += len(piece) or size  # a file that became shorter ends here, too
    return True


def require_own_file(root: Path, path: Path) -> None:
    """Return if `path` is a regular file inside the folder `root`, links followed. Raises `CorruptFile`."""
    require_inside(root, path)
    with open_regular(path):
        return


def require_inside(root: Path, path: Path) -> None:
    """Return if `path`, all links followed, is `inside` the folder `root`. Raises `CorruptFile`."""
    if not inside(root, path):
        raise CorruptFile.of(path, Defect.NOT_A_FILE, "is a link that leads out of its folder")


def inside(root: Path, path: Path) -> bool:
    """Whether `path`, all symlinks followed, is still inside the folder `root`.

    The Hub cache keeps a snapshot as links into the `blobs` folder next to it; those count as inside. So do links to a
    model's blobs from anywhere, as `hf download --local-dir` made them until 2024.
    """
    if path.parent == root and path.name != ".." and not os.path.islink(path):  # noqa: PTH114 - it raises for long names
        return True  # as nearly always: no link to follow
    real_root = Path(os.path.realpath(root))
    target = Path(os.path.realpath(path))
    if target.is_relative_to(real_root):
        return True
    if real_root.parent.name == "snapshots" and target.is_relative_to(real_root.parent.parent / "blobs"):
        return True
    blobs = target.parent
    return blobs.name == "blobs" and blobs.parent.name.startswith("models--") and bool(_BLOB.match(target.name))


_BLOB = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\Z")
"""A file's name in the Hub cache: its git or SHA-256 hash."""
