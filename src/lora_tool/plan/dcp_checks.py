"""What can be wrong with a torch distributed checkpoint, found in `.metadata` and in the headers of its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lora_tool.errors import Problem
from lora_tool.formats.dcp import METADATA, DcpFolder, missing_files, uncovered
from lora_tool.report import Finding, Severity

_COPY = "copy it from the machine that wrote it: every node writes its own ranks"


def structure_faults(found: DcpFolder, problems: Iterable[Problem]) -> Iterator[Finding]:
    """Yield everything that is wrong with the files, no value read: LT401, LT402, LT408.

    `problems` are those of the files that are there.
    """
    for name in missing_files(found):
        yield _error("LT401", str(found.folder / name), "is missing: .metadata says that it holds weights", _COPY)
    yield from unreadable(problems)
    for name, tensor in found.tensors.items():
        gap = uncovered(tensor)
        if gap:
            yield _error("LT408", str(found.folder / METADATA), gap, "save it again, or use another step", name)


def unreadable(problems: Iterable[Problem]) -> Iterator[Finding]:
    """Yield LT402 for each file that cannot be read."""
    for problem in problems:
        yield _error(
            "LT402", problem.path, problem.message, "copy the file again, or use another step", problem.subject
        )


def _error(code: str, path: str, message: str, hint: str, subject: str | None = None) -> Finding:
    return Finding(code=code, severity=Severity.ERROR, path=path, subject=subject, message=message, hint=hint)
