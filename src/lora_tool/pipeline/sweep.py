"""Merging each of several adapters on its own, one after the other: the base is opened once, a refusal stops no other."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoint import ModelDir
from lora_tool.display import as_options
from lora_tool.errors import FindingsFound, LoraToolError, WrongValue
from lora_tool.execution.folder import check_output, errors_of_the_system
from lora_tool.formats.files import expanded
from lora_tool.hub_names import hub_name
from lora_tool.options import called_with
from lora_tool.pipeline.merging import merge_inputs, planned, with_opened_base
from lora_tool.pipeline.writing import Written, write
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
    notes: tuple[str, ...] = ()

    @property
    def finished_before(self) -> bool:
        """Whether an earlier run wrote the same, so that `resume` left it as it is."""
        return self.written is not None and self.written.finished_before

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
    `merge` writes for each, byte by byte. The base is opened once. What refuses one adapter is its `error`, and the
    others are written. With `resume` a folder that an earlier run wrote from the same stays. Raises `WrongValue` for an
    argument, and for two adapters that would be written to one folder.
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
    one_merge = _Merge(
        asked=with_opened_base(asked), open_base=cache(opened_model), dry_run=dry_run, watch=watch, found=found
    )
    done = []
    for each, name in zip(listed, names, strict=True):
        done.append(one_merge.of(each, name, out / name))
        ended(done[-1])
    return tuple(done)


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


class _Merge(Struct, frozen=True, kw_only=True):
    """What the merges of one call share: their options, and the base."""

    asked: MergeArguments
    open_base: Callable[[Path], ModelDir]
    dry_run: bool
    watch: StageWatch
    found: Callable[[tuple[Finding, ...]], None]

    def of(self, adapter: Reference, name: str, path: Path) -> MergedOne:
        """Merge one adapter into the folder `path`, or plan that; an error of ours is in the result, any other is raised."""
        began = time.monotonic()
        one, notes = MergedOne(name=name, path=path), list[str]()
        try:
            with errors_of_the_system(None, path):
                one = self._merged(adapter, one, notes)
        except LoraToolError as error:
            one = replace(one, error=error)
        return replace(one, notes=tuple(notes), seconds=time.monotonic() - began)

    def _merged(self, adapter: Reference, one: MergedOne, notes: list[str]) -> MergedOne:
        asked = self.asked
        inputs = merge_inputs((adapter,), asked.base, open_base=self.open_base)
        notes += inputs.notes
        check_output(one.path, overwrite=asked.overwrite or asked.resume, inputs=inputs.paths)
        with planned(inputs, asked, one.path, dry_run=self.dry_run, note=notes.append) as plan:
            if plan is None or self.dry_run:
                return replace(one, plan=plan)
            written = write(plan, one.path, **asked.writing(), watch=self.watch, found=self.found)
        return replace(one, plan=plan, written=written)
