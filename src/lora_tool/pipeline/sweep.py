"""Merging each of several adapters on its own: the base is opened once, and read once for some of them at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tool.checkpoint import ModelDir
from lora_tool.display import as_options
from lora_tool.errors import FindingsFound, LoraToolError, WrongValue
from lora_tool.execution.folder import check_output, check_space, errors_of_the_system
from lora_tool.hub_names import hub_name
from lora_tool.pipeline.merging import called_with, merge_inputs, planned
from lora_tool.pipeline.writing import ReadBack, Written, being_written, work_of
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.merge.options import MergeArguments
from lora_tool.progress import Progress, StageWatch, unwatched
from lora_tool.report.findings import Finding
from lora_tool.report.json import finding_json
from lora_tool.sources import Reference, opened_model, several, source_of
from lora_tool.weighted import weighted

if TYPE_CHECKING:
    from lora_tool.execution.work import Unfinished


_MOST_FOLDERS = 32
"""Unfinished folders at a time on a cluster: enough tasks for all of its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedOne:
    """What became of one adapter of several: `written`, or the `error` that it was refused with; in a dry run its `plan`."""

    name: str
    path: Path
    """Where its model goes."""
    written: Written | None = None
    plan: Plan | None = field(default=None, repr=False)
    error: LoraToolError | None = None
    seconds: float = 0.0
    """Its own time and its share of what was done for several together."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.error is None

    @property
    def data_bytes(self) -> int | None:
        """Size of its weights; None where they were not planned."""
        return None if self.plan is None else self.plan.data_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        table = {"name": self.name, "output": str(self.path), "passed": self.passed, "seconds": round(self.seconds, 3)}
        if self.error is not None:
            report = self.error.report if isinstance(self.error, FindingsFound) else None
            hint = self.error.hint and as_options(self.error.hint)
            said = {"message": as_options(str(self.error)), "hint": hint}
            return table | {
                "error": said,
                "findings": [finding_json(each) for each in (report.findings if report else ())],
            }
        if self.written is not None:
            return table | {"error": None, "result": self.written.to_json()}
        return table | {"error": None, "plan": None if self.plan is None else self.plan.to_json()}


@called_with(MergeArguments)
def merge_each(adapters: Reference | Sequence[Reference], asked: MergeArguments) -> tuple[MergedOne, ...]:
    """Merge each of `adapters` on its own into its base, into the folder `out`/NAME, and return what became of each.

    NAME is the name of the adapter's folder, with those above it where two are called alike. The folders are those that
    `merge` writes for each alone, byte by byte. The base is read once for up to eight adapters. What refuses one
    adapter is its `error`, and the others are written. Raises `WrongValue` for an argument, and for two adapters that
    would be written to one folder.
    """
    return merge_several(adapters, asked)


def merge_several(
    adapters: Reference | Sequence[Reference],
    asked: MergeArguments,
    *,
    dry_run: bool = False,
    watch: StageWatch = unwatched,
    found: Callable[[tuple[Finding, ...]], None] = lambda _: None,
    ended: Callable[[MergedOne], None] = lambda _: None,
) -> tuple[MergedOne, ...]:
    """Do what `merge_each` does, or plan it in a `dry_run`; `ended` is called with each as it ends.

    `watch` is asked for the progress of the writing, `found` hears what the rules say of what was written.
    """
    if asked.out is None:
        raise WrongValue("out: each adapter gets a folder of its own below it: name one")
    out = Path(asked.out)
    asked.spread.require()
    listed = several(adapters)
    names = names_of(listed)
    if asked.base is not None:
        asked = replace(asked, base=opened_model(asked.base))
    if asked.original is not None:
        asked = replace(asked, original=opened_model(asked.original))
    sweep = _Sweep(asked, dry_run, watch, found, ended)
    waiting = [_One(each, name, out / name) for each, name in zip(listed, names, strict=True)]
    return tuple(sweep.all(waiting))


def names_of(adapters: Sequence[Reference]) -> list[str]:
    """Return what the folder of each adapter is called: as its own is, with those above it where two are called alike.

    Raises `WrongValue` for an adapter that is given twice, or with a weight.
    """
    paths = []
    for each in adapters:
        name, weight = weighted(each)
        if name is not each:
            raise WrongValue(
                f"{each}: the weight {weight:g} is for a sum of adapters, but each is merged on its own",
                hint="leave out the weight, or --each",
            )
        paths.append(_parts(each))
    twice = next((each for parts, each in zip(paths, adapters, strict=True) if paths.count(parts) > 1), None)
    if twice is not None:
        raise WrongValue(f"{twice} is given twice", hint="give each adapter once")
    depths = [1] * len(paths)
    while True:
        names = ["-".join(parts[-depth:]) for parts, depth in zip(paths, depths, strict=True)]
        alike = {name for name, count in Counter(names).items() if count > 1}
        longer = [
            min(depth + 1, len(parts)) if name in alike else depth
            for name, parts, depth in zip(names, paths, depths, strict=True)
        ]
        if not alike:
            return names
        if longer == depths:
            both = " and ".join(str(each) for name, each in zip(names, adapters, strict=True) if name in alike)
            raise WrongValue(f"{both} would be written to one folder", hint="merge one of them in a run of its own")
        depths = longer


def _parts(adapter: Reference) -> tuple[str, ...]:
    """Return the names that lead to the adapter, that of its own folder last."""
    path = adapter.root if not isinstance(adapter, str | os.PathLike) else Path(adapter).expanduser()
    source = source_of(path)
    named = hub_name(str(adapter)) if not path.exists() else None
    if source.hub_id is not None:
        return tuple(source.hub_id.split("/"))
    if named is not None:
        *owner, name = named.id.split("/")
        return (*owner, f"{name}-{named.revision}" if named.revision else name)
    return Path(os.path.abspath(path)).parts[1:] or ("adapter",)  # noqa: PTH100 - links stay as named


@dataclass(slots=True)
class _One:
    """An adapter on its way, with what is to be closed when it ends."""

    adapter: Reference
    name: str
    path: Path
    contexts: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    plan: Plan | None = None
    read_back: ReadBack | None = None
    folder: Unfinished | None = None
    written: Written | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    error: LoraToolError | None = None

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Do a part of its work inside: an error that is ours ends it alone, any other everything."""
        began = time.monotonic()
        try:
            with errors_of_the_system(None, self.path):
                yield
        except LoraToolError as error:
            self.fail(error)
        finally:
            self.seconds += time.monotonic() - began

    def fail(self, error: LoraToolError) -> None:
        """Close what was begun, which leaves nothing of it."""
        self.error = error
        with contextlib.suppress(LoraToolError), self.contexts:
            raise error

    def finish(self) -> None:
        """Take in what was written, once the folder has its name."""
        self.written = None if self.read_back is None else self.read_back.written()

    def ended(self) -> MergedOne:
        """Return what became of it."""
        return MergedOne(
            name=self.name,
            path=self.path,
            written=self.written,
            plan=self.plan,
            error=self.error,
            seconds=self.seconds,
            notes=tuple(self.notes),
        )


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What all adapters of one call share."""

    asked: MergeArguments
    dry_run: bool
    watch: StageWatch
    found: Callable[[tuple[Finding, ...]], None]
    on_end: Callable[[MergedOne], None]

    def all(self, waiting: Sequence[_One]) -> Iterator[MergedOne]:
        """Yield what became of each, in their order."""
        open_base = cache(opened_model)
        at_once = self._at_once()
        for first in range(0, len(waiting), at_once):
            group = waiting[first : first + at_once]
            with contextlib.ExitStack() as interrupted:
                for one in group:
                    interrupted.push(one.contexts)  # what ends everything closes what others have begun
                    with one.tried():
                        self._plan(one, open_base)
                self._write([one for one in group if one.error is None])
            for one in group:
                done = one.ended()
                self.on_end(done)
                yield done

    def _at_once(self) -> int:
        """Return how many are written in one pass. What PEFT merges takes a copy of the model each."""
        if self.asked.allow_in_memory or self.dry_run:
            return 1
        if self.asked.spread.cluster is not None:
            return _MOST_FOLDERS
        from lora_tool.execution.one_pass import most_plans  # noqa: PLC0415 - what computes: no dry run uses it

        return most_plans(self.asked.jobs)

    def _plan(self, one: _One, open_base: Callable[[Path], ModelDir]) -> None:
        asked = self.asked
        inputs = merge_inputs((one.adapter,), asked.base, open_base=open_base)
        check_output(one.path, overwrite=asked.overwrite, inputs=inputs.paths)
        planning = planned(inputs, asked, one.path, dry_run=self.dry_run, note=one.notes.append)
        one.plan = one.contexts.enter_context(planning)

    def _write(self, planned: Sequence[_One]) -> None:
        """Write the planned ones: each ends when it is read back, or with an error."""
        if self.dry_run or not planned:
            for one in planned:
                one.contexts.close()
            return
        from lora_tool.execution.engine import engine_of_several  # noqa: PLC0415 - what computes: no dry run uses it

        plans = [one.plan for one in planned if one.plan is not None]
        with self.watch(*work_of(plans)) as progress:
            for one in planned:
                with one.tried():
                    if not self.asked.resume:
                        check_space(one.path, sum(plan.data_bytes for plan in plans))
                    self._begin(one, progress)
            begun = [(one, one.folder) for one in planned if one.folder is not None and one.error is None]
            began = time.monotonic()
            engine = engine_of_several(self.asked.spread, jobs=self.asked.jobs)
            ended = engine.run_each([folder for _, folder in begun]) if begun else []
            share = (time.monotonic() - began) / max(1, len(begun))
            for (one, folder), how in zip(begun, ended, strict=True):
                one.seconds += share
                with one.tried():
                    if isinstance(how, Exception):
                        raise how
                    folder.done = how
                    one.contexts.close()
                    one.finish()

    def _begin(self, one: _One, progress: Progress) -> None:
        if one.plan is None:
            raise AssertionError("only a dry run has no plan")
        asked = self.asked
        one.read_back = ReadBack(plan=one.plan, out=one.path, jobs=asked.jobs, found=self.found)
        one.folder = one.contexts.enter_context(
            being_written(
                one.read_back,
                verify=asked.verify,
                overwrite=asked.overwrite,
                resume=asked.resume,
                progress=progress,
            )
        )
