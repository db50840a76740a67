"""What can be wrong with a torch distributed checkpoint, found in `.metadata` and in the headers of its chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

from lora_tool.errors import Problem
from lora_tool.formats.dcp import METADATA, DcpFolder, Piece, Pieces, missing_files, uncovered
from lora_tool.formats.files import open_regular, read_at
from lora_tool.report import Finding, Severity
from lora_tool.tensors import StoredTensor

_COPY = "copy it from the machine that wrote it: every node writes its own ranks"


def structure_faults(found: DcpFolder, pieces: Pieces, problems: Iterable[Problem]) -> Iterator[Finding]:
    """Yield everything that is wrong with the files, hardly a value read: LT401, LT402, LT405, LT408.

    `pieces` and `problems` are those of the files that are there.
    """
    for name in missing_files(found):
        yield _error("LT401", str(found.folder / name), "is missing: .metadata says that it holds weights", _COPY)
    yield from unreadable(problems)
    yield from copied(pieces)
    for name, tensor in found.tensors.items():
        gap = uncovered(tensor)
        if gap:
            yield _error("LT408", str(found.folder / METADATA), gap, "save it again, or use another step", name)


def copied(pieces: Pieces) -> Iterator[Finding]:
    """LT405: yield files that hold what another file does, although they are of other rows of the same tensors."""
    held: dict[Path, list[tuple[str, Piece]]] = defaultdict(list)
    for name, parts in pieces.items():
        for piece in parts:
            held[piece.record.path].append((name, piece))
    seen: dict[Hashable, Path] = {}
    for path, inside in held.items():
        content = tuple((name, piece.stored.spans[0].offset, piece.record.crc) for name, piece in inside)
        other = seen.setdefault(content, path)
        # rows that are all 1 or all 0 may well be those of another rank
        if other != path and any(_varies(piece.stored) for _, piece in inside):
            yield _error("LT405", str(path), f"has the same content as {other.name}, of another rank", _COPY)


def _varies(tensor: StoredTensor) -> bool:
    """Return whether the first elements differ from each other."""
    (span,) = tensor.spans
    with open_regular(span.path) as fd:
        data = read_at(span.path, fd, span.offset, min(span.nbytes, 4096))
    size = tensor.dtype.bits // 8
    return data[size:] != data[:-size]


def unreadable(problems: Iterable[Problem]) -> Iterator[Finding]:
    """Yield LT402 for each file that cannot be read."""
    for problem in problems:
        yield _error(
            "LT402", problem.path, problem.message, "copy the file again, or use another step", problem.subject
        )


def _error(code: str, path: str, message: str, hint: str, subject: str | None = None) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, path=path, subject=subject, message=message, hint=hint)
