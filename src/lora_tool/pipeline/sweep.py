"""Merging each of several adapters on its own: the base is opened once, and read once for some of them at a time."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.checkpoint import ModelDir
from lora_tool.display import as_options
from lora_tool.errors import FindingsFound, LoraToolError, WrongValue
from lora_tool.execution.folder import check_output
from lora_tool.formats.files import expanded
from lora_tool.formats.manifest import FILE_NAME
from lora_tool.hub_names import hub_name
from lora_tool.options import called_with
from lora_tool.pipeline.merging import merge_inputs, planned, with_opened_base
from lora_tool.pipeline.passes import Passes, Underway
from lora_tool.pipeline.writing import Written
from lora_tool.plan.core.manifest import is_written
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.merge.options import MergeArguments
from lora_tool.progress import StageWatch, unwatched
from lora_tool.report.findings import Finding
from lora_tool.report.json import finding_json
from lora_tool.sources import Reference, opened_model, several, source_of
from lora_tool.weighted import weighted


class MergedOne(Struct, frozen=True, kw_only=True):
    """What became of one adapter of several: `written`, or the `error` that it was refused with; in a dry run its `plan`."""

    name: str
    path: Path
    """Where its model goes."""
    written: Written | None = None
    plan: Plan | None = None
    error: LoraToolError | None = None
    seconds: float = 0.0
    """Its own time and its share of what was done for several together."""
    notes: tuple[str, ...] = ()
    finished_before: bool = False
    """Whether an earlier run wrote the same, so that `resume` left it as it is."""

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
        if self.finished_before:
            return table | {"error": None, "finished_before": True}
        if self.written is not None:
            return table | {"error": None, "result": self.written.to_json()}
        return table | {"error": None, "plan": None if self.plan is None else self.plan.to_json()}


@called_with(MergeArguments)
def merge_each(adapters: Reference | Sequence[Reference], asked: MergeArguments) -> tuple[MergedOne, ...]:
    """Merge each of `adapters` on its own into its base, into the folder `out`/NAME, and return what became of each.

    NAME is the name of the adapter's folder, with those above it where two are called alike. The folders are those that
    `merge` writes for each alone, byte by byte. The base is read once for up to eight adapters. What refuses one
    adapter is its `error`, and the others are written. All are planned before one is written, unless PEFT may merge in
    memory. With `resume` a folder that an earlier run wrote from the same stays. Raises `WrongValue` for an argument, and
    for two adapters that would be written to one folder, and `OutOfSpace` where the disk has no room for all of them.
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
    """Do what `merge_each` does, or plan it in a `dry_run`; `ended` is called with each as it ends, the refused first.

    `watch` is asked for the progress of the writing, `found` hears what the rules say of what was written.
    """
    if asked.out is None:
        raise WrongValue("out: each adapter gets a folder of its own below it: name one")
    out = Path(asked.out)
    asked.spread.require()
    listed = several(adapters)
    names = names_of(listed)
    asked = with_opened_base(asked)
    passes = Passes(
        spread=asked.spread,
        jobs=asked.jobs,
        one_by_one=asked.allow_in_memory,
        verify=asked.verify,
        resume=asked.resume,
        watch=watch,
        found=found,
    )
    waiting = [
        _One(adapter=each, name=name, path=out / name, overwrite=asked.overwrite)
        for each, name in zip(listed, names, strict=True)
    ]
    _Sweep(asked=asked, passes=passes, dry_run=dry_run, ended=ended).all(waiting)
    return tuple(one.ended() for one in waiting)


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
    path = adapter.root if not isinstance(adapter, str | os.PathLike) else expanded(adapter)
    source = source_of(path)
    named = hub_name(str(adapter)) if not path.exists() else None
    if source.hub_id is not None:
        return tuple(source.hub_id.split("/"))
    if named is not None:
        *owner, name = named.id.split("/")
        return (*owner, f"{name}-{named.revision}" if named.revision else name)
    return Path(os.path.abspath(path)).parts[1:] or ("adapter",)  # noqa: PTH100 - links stay as named


class _One(Underway, kw_only=True):
    """An adapter on its way."""

    adapter: Reference
    name: str
    notes: list[str] = field(default_factory=list)
    finished_before: bool = False

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
            finished_before=self.finished_before,
        )


class _Sweep(Struct, frozen=True, kw_only=True):
    """What all adapters of one call share."""

    asked: MergeArguments
    passes: Passes
    dry_run: bool
    ended: Callable[[MergedOne], None]

    def all(self, waiting: Sequence[_One]) -> None:
        """Merge them all, or plan that: all are planned, and their room on the disk is there, before one is written."""
        open_base = cache(opened_model)
        with contextlib.ExitStack() as interrupted:
            for together in self.passes.planned_together(waiting):
                for one in together:
                    interrupted.push(one.contexts)  # what ends everything closes what others have begun
                    with one.tried():
                        self._plan(one, open_base)
                    if self.dry_run or one.error is not None or one.finished_before:
                        self.ended(one.ended())
                going = [one for one in together if one.error is None and not one.finished_before]
                if not self.dry_run:
                    self._write(going)

    def _plan(self, one: _One, open_base: Callable[[Path], ModelDir]) -> None:
        asked = self.asked
        inputs = merge_inputs((one.adapter,), asked.base, open_base=open_base)
        one.notes += inputs.notes
        may_be_written = asked.resume and (one.path / FILE_NAME).is_file()
        check_output(one.path, overwrite=asked.overwrite or may_be_written, inputs=inputs.paths)
        planning = planned(inputs, asked, one.path, dry_run=self.dry_run, note=one.notes.append)
        one.plan = one.contexts.enter_context(planning)
        one.finished_before = may_be_written and is_written(one.planned, one.path)
        if one.finished_before:
            one.contexts.close()
        elif may_be_written:
            check_output(one.path, overwrite=asked.overwrite, inputs=inputs.paths)

    def _write(self, going: Sequence[_One]) -> None:
        groups = self.passes.groups(going)
        self.passes.require_room(groups)
        for group in groups:
            self.passes.write(group)
            for one in group:
                self.ended(one.ended())
