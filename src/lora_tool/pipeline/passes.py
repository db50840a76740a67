"""Writing several folders from plans: some of them in one pass over what they read alike; what stops one stops no other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

from lora_tool.cluster.spread import Spread
from lora_tool.errors import LoraToolError
from lora_tool.execution.folder import check_space, errors_of_the_system
from lora_tool.pipeline.writing import ReadBack, Written, being_written, work_of
from lora_tool.plan.core.plan import Plan
from lora_tool.progress import Progress, StageWatch, unwatched
from lora_tool.report.findings import Finding

if TYPE_CHECKING:
    from lora_tool.execution.work import Unfinished

_MOST_FOLDERS = 32
"""Unfinished folders at a time on a cluster: enough tasks for all of its nodes."""

Item = TypeVar("Item")


class Underway(Struct, kw_only=True):
    """A folder on its way: its plan, what was written or the error that it ended with, and what is closed when it ends."""

    path: Path
    overwrite: bool = False
    plan: Plan | None = None
    written: Written | None = None
    error: LoraToolError | None = None
    seconds: float = 0.0
    """Its own time and its share of what was done for several together."""
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    folder: Unfinished | None = None
    read_back: ReadBack | None = None

    @property
    def planned(self) -> Plan:
        """Its plan, for what is about to be written, or was."""
        if self.plan is None:
            raise AssertionError("only what is planned is written")
        return self.plan

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Do a part of its work inside: an error that is ours ends it alone, any other everything."""
        began = time.monotonic()
        try:
            with errors_of_the_system(None, self.path):
                yield
        except LoraToolError as error:
            self._fail(error)
        finally:
            self.seconds += time.monotonic() - began

    def _fail(self, error: LoraToolError) -> None:
        """Close what was begun, which leaves nothing of it."""
        self.error = error
        with contextlib.suppress(LoraToolError), self.contexts:
            raise error

    def finish(self) -> None:
        """Give the folder its name, and take in what was written. Raises as `write` does."""
        self.contexts.close()
        self.written = None if self.read_back is None else self.read_back.written()


class Passes(Struct, frozen=True, kw_only=True):
    """How folders are written in one pass: `jobs` and `resume` are those of `execute`; with `verify` each is read back."""

    spread: Spread
    jobs: int | None
    one_by_one: bool
    """Whether each is planned and written before the next is planned: what PEFT merges takes a copy of the model each."""
    verify: bool = True
    resume: bool = False
    watch: StageWatch = unwatched
    found: Callable[[tuple[Finding, ...]], None] = lambda _: None

    def planned_together(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return the items in the groups of which all are planned before the first is written."""
        return [[each] for each in items] if self.one_by_one else [items] if items else []

    def groups(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return the items in the groups that are written in one pass each."""
        at_once = self._at_once()
        return [items[first : first + at_once] for first in range(0, len(items), at_once)]

    def _at_once(self) -> int:
        if self.one_by_one:
            return 1
        if self.spread.cluster is not None:
            return _MOST_FOLDERS
        from lora_tool.execution.one_pass import most_plans  # what computes: no dry run uses it

        return most_plans(self.jobs)

    def require_room(self, groups: Sequence[Sequence[Underway]]) -> None:
        """Return if the disk has room for the folders of all groups, which are written one after the other, side by side.

        A folder that is replaced goes when the new one has its name. With `resume` every folder is looked at by itself.
        Raises `OutOfSpace`.
        """
        if not groups or self.resume:
            return
        most = held = count = 0
        for group in groups:
            held += sum(one.planned.data_bytes for one in group)
            most, count = max(most, held), count + len(group)
            held -= sum(_bytes_in(one.path) for one in group)
        check_space(groups[0][0].path.parent, most, folders=count)

    def write(self, group: Sequence[Underway]) -> None:
        """Write the folders of one group, which are planned: each ends when it is read back, or with an error."""
        from lora_tool.execution.engine import engine_of_several  # what computes: no dry run uses it

        with self.watch(*work_of(one.planned for one in group)) as progress:
            for one in group:
                if one.error is None:
                    with one.tried():
                        self._begin(one, progress)
            begun = [(one, one.folder) for one in group if one.folder is not None and one.error is None]
            began = time.monotonic()
            engine = engine_of_several(self.spread, jobs=self.jobs)
            ended = engine.run_each([folder for _, folder in begun]) if begun else []
            share = (time.monotonic() - began) / max(1, len(begun))
            for (one, folder), how in zip(begun, ended, strict=True):
                one.seconds += share
                with one.tried():
                    if isinstance(how, Exception):
                        raise how
                    folder.done = how
                    one.finish()

    def _begin(self, one: Underway, progress: Progress) -> None:
        one.read_back = ReadBack(plan=one.planned, out=one.path, jobs=self.jobs, found=self.found)
        one.folder = one.contexts.enter_context(
            being_written(
                one.read_back, verify=self.verify, overwrite=one.overwrite, resume=self.resume, progress=progress
            )
        )


def _bytes_in(folder: Path) -> int:
    """Return the size of the files of a folder that a new one replaces."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    except OSError:  # it is not there
        return 0
