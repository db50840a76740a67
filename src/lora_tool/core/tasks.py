"""What can be done on another machine, and what that machine must have for it: plain data, which is pickled and sent."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from lora_tool.core.errors import ExecutionError, SourceChanged
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import FileStamp
from lora_tool.core.version import __version__


class ClusterTask(Protocol):
    """A piece of work that can be done alone, twice, and at the same time as itself: the result is the same."""

    @property
    def name(self) -> str:
        """What it is about, for whoever reads that it failed."""

    @property
    def nbytes(self) -> int:
        """How many bytes it reports to `progress`."""

    def run(self, progress: Progress) -> Any:  # noqa: ANN401 - whatever the task is for
        """Do it and return the result, which can be pickled. Raises `LoraToolError`."""


class Surroundings(Struct, frozen=True, kw_only=True):
    """What the tasks of one run take for granted: software of these versions, and files as they were planned with."""

    directory: Path | None
    """What relative paths are relative to, None where there are none."""
    inputs: tuple[FileStamp, ...]
    versions: Mapping[str, str]
    """Package → its version: all of them decide about the bytes."""
    mark: Path | None = None
    """A file that was written just now, where the output goes: storage that is not shared does not have it."""

    def enter(self, node: str) -> None:
        """Return if all is so on this machine, called `node`; relative paths mean the same from then on.

        Raises `ExecutionError`, and `SourceChanged` for an input that is another file here.
        """
        for package, version in self.versions.items():
            found = installed_version(package)
            if found != version:
                has = f"has {package} {found}" if found else f"has no {package}"
                raise ExecutionError(
                    f"node {node} {has}, and this machine {version}: they may not compute the same bytes",
                    hint=f"install the same on all nodes: pip install '{package}=={version}'",
                )
        if self.directory is not None:
            try:
                os.chdir(self.directory)
            except OSError as error:
                raise ExecutionError(
                    f"node {node} cannot enter the working directory {self.directory}: {error.strerror}",
                    hint="run from a folder on storage that all nodes share, or give absolute paths",
                ) from error
        if self.mark is not None:
            _require_shared(self.mark, node)
        for stamp in self.inputs:
            _require_same(stamp, node)


class TaskGroup(Struct, frozen=True, kw_only=True):
    """Tasks of one result: as soon as one of them fails, the others are not needed."""

    tasks: Sequence[ClusterTask]
    surroundings: Surroundings
    """What a machine must have for each of them."""
    done: Callable[[int, Any], None]
    """Called with a task's place among them and its result, as it comes."""


def directory_for(paths: Iterable[Path]) -> Path | None:
    """Return the working directory, None where no path is relative to it."""
    return None if all(path.is_absolute() for path in paths) else Path.cwd()


def versions_here(*packages: str) -> dict[str, str]:
    """Return the versions of lora-tool, of Python and of the packages on this machine."""
    return {package: installed_version(package) or "" for package in ("lora-tool", "python", *packages)}


def _require_shared(mark: Path, node: str) -> None:
    """Return if the folder in which `mark` was written is the same here, and can be written."""
    out = mark.parent.parent
    if not os.path.isfile(mark):  # noqa: PTH113 - `is_file` raises where a folder above may not be entered
        raise ExecutionError(
            f"node {node} does not see {out}: the output must be on storage that all nodes share",
            hint="give a folder on shared storage: `out=OUT`",
        )
    try:
        tempfile.TemporaryFile(dir=mark.parent).close()
    except OSError as error:
        raise ExecutionError(
            f"node {node} cannot write to {out}: {error.strerror}",
            hint="let the user whose processes run there write to it, or give another folder: `out=OUT`",
        ) from error


def _require_same(stamp: FileStamp, node: str) -> None:
    """Return if the file is here as the plan saw it, and can be opened."""
    hint = "inputs must be on storage that all nodes share, under the same path"
    try:
        now = FileStamp.of(stamp.path)
        if now.is_same(stamp):
            os.close(os.open(stamp.path, os.O_RDONLY | os.O_CLOEXEC))
            return
    except OSError as error:
        raise ExecutionError(f"node {node} cannot read {stamp.path}: {error.strerror}", hint=hint) from error
    raise SourceChanged(
        f"node {node} sees another {stamp.path}: {stamp.difference(now)}",
        hint=f"{hint}; if something writes to it, run again once that is over",
    )


def installed_version(package: str) -> str | None:
    """Return the version of a package that is installed here, None where it is not. Python counts as a package."""
    if package == "lora-tool":
        return __version__
    if package == "python":
        return ".".join(map(str, sys.version_info[:2]))
    try:
        return str(__import__(package).__version__)
    except ImportError:
        return None
