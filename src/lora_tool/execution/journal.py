"""Which files of an unfinished folder are finished, so that `--resume` can continue a killed run.

One line of JSON per file, written after the file is on the disk. A file counts as finished if its line is whole, the
plan is the same, and the file is as it was: size, header, time of its last write, and samples of its bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_tool.errors import MissingDependency
from lora_tool.execution.backends.choosing import arithmetic_of
from lora_tool.formats.files import read_at
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import Shard
from lora_tool.version import __version__

FILE_NAME = ".lora-tool-journal"
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 14


def digest_of(plan: Plan) -> str:
    """Return a sha256 that is the same for plans that write the same bytes from the same files.

    Raises `MissingDependency` where the plan computes with torch, and there is none.
    """
    content = {
        "plan": plan.to_json(),
        "manifest": dict(plan.manifest),
        "inputs": [[str(stamp.path), stamp.size, stamp.mtime_ns, stamp.inode] for stamp in plan.inputs],
        "versions": [__version__, *_versions(plan)],
        "arithmetic": arithmetic_of(plan),
    }
    text = json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).hexdigest()


def _versions(plan: Plan) -> Iterator[str]:
    """Yield the versions of what computes; importing it is slow, and a plan of copies needs none."""
    for package in plan.precision.packages if not plan.only_copies else ():
        try:
            yield str(__import__(package).__version__)
        except ImportError as error:
            raise MissingDependency(package, extra="merge") from error


class Journal:
    """The record of one unfinished folder."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._path = folder / FILE_NAME
        self._digest = digest_of(plan)

    def finished(self, shards: Mapping[str, Shard]) -> dict[str, Any]:
        """Return the finished files of this plan with the notes on each. Removes all other files."""
        finished: dict[str, Any] = {}
        for line in self._lines():
            shard = shards.get(str(line.get("file")))
            if shard is not None and line.get("plan") == self._digest and line.get("state") == self._state(shard):
                finished[shard.filename] = line.get("notes")
        for path in self._folder.iterdir():
            if path.name not in finished and path != self._path:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return finished

    def add(self, shard: Shard, notes: Any) -> None:  # noqa: ANN401 - anything that JSON holds
        """Record that the shard's file is on the disk."""
        line = {"plan": self._digest, "file": shard.filename, "state": self._state(shard), "notes": notes}
        # not flushed to the disk: a line that the machine loses with its power costs a file that is written again
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def remove(self) -> None:
        """Take the record out of the folder, which is about to be finished."""
        self._path.unlink(missing_ok=True)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return []
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # the last line of a run that was killed while writing it
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict)]

    def _state(self, shard: Shard) -> list[Any] | None:
        """Return what a file looks like; None where it is not there or has another header."""
        path = self._folder / shard.filename
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            stat = os.fstat(descriptor)
            header = shard.header
            if stat.st_size != len(header) + shard.data_bytes or read_at(path, descriptor, 0, len(header)) != header:
                return None
            sampled = hashlib.sha256()
            last = max(0, stat.st_size - _SAMPLE_BYTES)
            for number in range(_SAMPLES):
                sampled.update(read_at(path, descriptor, last * number // (_SAMPLES - 1), _SAMPLE_BYTES))
            return [stat.st_size, stat.st_mtime_ns, sampled.hexdigest()]
        finally:
            os.close(descriptor)
