"""Tasks that the tests send to the nodes, which import this module."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool.core.errors import MissingDependency
from lora_tool.core.progress import Progress
from lora_tool.core.tasks import ClusterTask, Surroundings

GO = "go"


@dataclass(frozen=True, kw_only=True)
class Dying:
    """A task whose process is killed in the middle, the first `times` times, once what it reported `was_seen`."""

    folder: Path
    times: int
    was_seen: Path = Path("/")
    name: str = "dying"
    nbytes: int = 128 << 20

    def run(self, progress: Progress) -> int:
        progress(self.nbytes // 2)
        tries = len(list(self.folder.iterdir()))
        (self.folder / str(tries)).touch()
        if tries < self.times:
            while not self.was_seen.exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        progress(self.nbytes // 2)
        return tries


class Deadly(Surroundings, frozen=True, kw_only=True):
    """What kills the process that looks whether the `victim` has it."""

    victim: str

    def enter(self, node: str) -> None:
        if self.victim in node:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Stale:
    """A task whose file the network storage has lost for a moment, or that meets another error of the system."""

    folder: Path
    times: int
    number: int = errno.ESTALE
    name: str = "stale"
    nbytes: int = 1

    def run(self, progress: Progress) -> int:
        from lora_tool.execution.folder import errors_of_the_system

        tries = len(list(self.folder.iterdir()))
        (self.folder / str(tries)).touch()
        with errors_of_the_system(None, self.folder):
            if tries < self.times:
                raise OSError(self.number, os.strerror(self.number), "shard")
        progress(1)
        return tries


@dataclass(frozen=True, kw_only=True)
class Lacking:
    """A task that needs a package that is not there."""

    name: str = "lacking"
    nbytes: int = 0

    def run(self, _: Progress) -> None:
        raise MissingDependency("torch", extra="merge")


@dataclass(frozen=True, kw_only=True)
class Lingering:
    """A task that takes its time."""

    folder: Path
    seconds: float
    name: str = "lingering"
    nbytes: int = 0

    def run(self, _: Progress) -> None:
        (self.folder / str(os.getpid())).touch()
        time.sleep(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Failing:
    """A task that meets an error which is none of ours."""

    error: BaseException
    name: str = "failing"
    nbytes: int = 0

    def run(self, _: Progress) -> None:
        raise self.error


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A task that says where it is at work in the middle of its file, and waits there until somebody says `GO`."""

    task: ClusterTask
    told: Path

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def nbytes(self) -> int:
        return self.task.nbytes

    @property
    def work(self) -> Any:
        return self.task.work  # type: ignore[attr-defined] # a Part's

    def run(self, progress: Progress) -> Any:
        import ray

        def slowly(nbytes: int) -> None:
            (self.told / f"{ray.util.get_node_ip_address()}.{os.getpid()}").touch()
            while not (self.told / GO).exists():
                time.sleep(0.02)
            progress(nbytes)

        return self.task.run(slowly)
