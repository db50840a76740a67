"""What earlier runs of a pipeline proved, so that nothing is done twice: a small JSON file in the output.

Until the output is there the file lies beside it, so that a run that was cut off is known again.

A stage is known by a key, the hash of everything that decides its result: the version, the options, and name, size and
times of every input file. Its result is trusted while the files that it left still have the sizes and times they had.
Of the two times that of the last change of the inode counts, too: `cp -p`, `rsync -t` and `touch -d` set the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from lora_tool.core.errors import CorruptFile
from lora_tool.core.version import __version__
from lora_tool.execution.folder import replace_file
from lora_tool.formats.files import is_file, read_json
from lora_tool.workflows.ci.model import Ranked

Stamps = dict[str, list[int]]


FILE_NAME = ".lora-tool-ci.json"
"""In an output; it is no part of what was made."""


def _beside(output: Path) -> Path:
    return output.parent / f".{output.name}{FILE_NAME}"


def key_of(options: object, folders: Iterable[Path], *, own: Iterable[Path] = ()) -> str:
    """Return the key of a stage that reads `folders` and is given `options`, anything that prints alike when equal.

    What lies at or under `own` was written by the pipeline and is no input, wherever it lies.
    """
    left_out = tuple(own)
    stamps = {os.path.realpath(folder): stamps_of(folder, left_out) for folder in folders}
    decides = json.dumps([__version__, repr(options), stamps], sort_keys=True)
    return hashlib.sha256(decides.encode()).hexdigest()


def stamps_of(folder: Path, own: Iterable[Path] = ()) -> Stamps:
    """Return file → size and times of change in ns, of all files in and under the folder, those of `own` left out."""
    stamps: Stamps = {}
    left_out = {Path(os.path.realpath(path)) for path in own}
    hidden = tuple(f".{path.name}." for path in left_out)  # what is half written, and the cache
    for where, folders, names in os.walk(folder):
        inside = Path(os.path.realpath(where))
        folders[:] = [name for name in folders if inside / name not in left_out and not _half(inside / name, hidden)]
        for name in names:
            if name == FILE_NAME or inside / name in left_out or _half(inside / name, hidden):
                continue
            path = Path(where, name)
            try:
                found = path.stat()
            except OSError:  # it went away: whoever reads it says so
                continue
            stamps[str(path.relative_to(folder))] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return stamps


def _half(path: Path, hidden: tuple[str, ...]) -> bool:
    return bool(hidden) and path.name.startswith(hidden)


class StageCache:
    """What was proved about one output, in it or beside it. A file that is broken, or of another shape, proves nothing."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._held = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        places = (_beside(self._output), self._output / FILE_NAME)  # the first is there while a run has not ended
        try:
            raw: object = next((read_json(place) for place in places if is_file(place)), {})
        except CorruptFile:
            raw = {}
        table = raw.get("stages") if isinstance(raw, dict) else None
        return (
            {name: entry for name, entry in table.items() if isinstance(entry, dict)} if isinstance(table, dict) else {}
        )

    def __bool__(self) -> bool:
        """Whether an earlier run has begun anything."""
        return bool(self._held)

    def summary(self, stage: str, key: str, folder: Path) -> str | None:
        """Return what the stage said when it was done with this key, if `folder` is as it left it; else None."""
        entry: Mapping[str, Any] = self._held.get(stage, {})
        same = entry.get("key") == key and folder.is_dir() and entry.get("left") == stamps_of(folder)
        summary = entry.get("summary")
        return summary if same and isinstance(summary, str) else None

    def warnings(self, stage: str) -> tuple[str, ...]:
        """Return what the stage warned of when it was done."""
        found = self._held.get(stage, {}).get("warnings")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def ranking(self, stage: str) -> Ranked | None:
        """Return how the pairs were ranked when the stage was done, None where that was not noted."""
        found = self._held.get(stage, {}).get("ranking")
        accuracy, margin = (found.get("accuracy"), found.get("margin")) if isinstance(found, dict) else (None, None)
        if not isinstance(accuracy, float | int) or not isinstance(margin, float | int | None):
            return None
        return Ranked(accuracy=accuracy, margin=margin)

    def begun(self, stage: str, key: str) -> bool:
        """Return whether a run that was cut off had begun the stage with this key."""
        return self._held.get(stage, {}).get("key") == key

    def begin(self, stage: str, key: str) -> None:
        """Note that the stage begins: what then appears under the output's name, at once and whole, is its result."""
        self._held[stage] = {"key": key}
        self._write(_beside(self._output))

    def keep(
        self,
        stage: str,
        key: str,
        folder: Path,
        summary: str,
        warnings: Iterable[str] = (),
        *,
        ranking: Ranked | None = None,
    ) -> None:
        """Note that the stage is done, what it said, and how it left `folder`."""
        entry = {"key": key, "left": stamps_of(folder), "summary": summary, "warnings": list(warnings)}
        self._held[stage] = entry if ranking is None else {**entry, "ranking": asdict(ranking)}
        beside = _beside(self._output)
        if os.path.realpath(folder) == os.path.realpath(self._output):
            self._write(folder / FILE_NAME)
            beside.unlink(missing_ok=True)
        else:
            self._write(beside)

    def close(self) -> None:
        """Leave nothing beside an output that is not there, unless something was proved that the next run can use."""
        if not self._output.exists() and not any("left" in entry for entry in self._held.values()):
            with contextlib.suppress(OSError):  # the folder may be read only
                _beside(self._output).unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"schema_version": 1, "stages": self._held}, indent=1).encode())
