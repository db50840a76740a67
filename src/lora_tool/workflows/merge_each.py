"""Merging each of several adapters on its own, one after the other: the base is opened once, a refusal stops no other."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from lora_tool.adapters.weighted import weighted
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.sources import Reference, opened_model, several, source_of
from lora_tool.core.display import as_options, printable, shortened
from lora_tool.core.errors import FindingsFound, LoraToolError, WrongValue
from lora_tool.core.hub_names import hub_name
from lora_tool.core.records import Shown
from lora_tool.core.report.json import finding_json
from lora_tool.execution.folder import errors_of_the_system
from lora_tool.formats.files import expanded
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.options import MergeArguments
from lora_tool.workflows.caller import LIBRARY, Caller
from lora_tool.workflows.merge import merge, with_opened_base
from lora_tool.workflows.written import Planned, Written


class MergedOne(Shown, Struct, frozen=True, kw_only=True):
    """What became of one adapter of several: `written`, or the `error` that it was refused with; in a dry run its `plan`."""

    name: str
    path: Path
    """Where its model goes."""
    written: Written | None = None
    plan: Plan | None = None
    error: LoraToolError | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.error is not None:
            return printable(f"{self.name}: refused: {self.error}")
        done = "" if self.written is None else f"written to {self.path}; {self.written.verdict}".removesuffix("; ")
        return printable(f"{self.name}: {done or f'would be written to {self.path}'}")

    def __repr__(self) -> str:
        became = self.error or self.written or self.plan
        return f"MergedOne({self.name!r}: {shortened(repr(became), 300)})"

    @property
    def finished_before(self) -> bool:
        """Whether an earlier run wrote the same, so that `resume` left it as it is."""
        return self.written is not None and self.written.finished_before

    @property
    def passed(self) -> bool:
        return self.error is None

    @property
    def data_bytes(self) -> int | None:
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


def merge_each(
    adapters: Reference | Sequence[Reference],
    options: MergeArguments,
    caller: Caller = LIBRARY,
    ended: Callable[[MergedOne], None] = lambda _: None,
) -> tuple[MergedOne, ...]:
    """Merge each of `adapters` on its own into its base, into the folder `out`/NAME, and return what became of each.

    NAME is the name of the adapter's folder, with those above it where two are called alike. The folders are those that
    `merge` writes for each, byte by byte. The base is opened once. What refuses one adapter is its `error`, and the
    others are written. With `resume` a folder that an earlier run wrote from the same stays. `ended` is called with each
    as it ends. Raises `WrongValue` for an argument, and for two adapters that would be written to one folder.
    """
    if options.out is None:
        raise WrongValue("merging each adapter on its own needs `out=OUT`: each gets a folder of its own in it")
    if caller.part is not None:
        raise WrongValue("a part is a share of one output, but each adapter gets one: leave out `part=I/N`")
    if options.average:
        raise WrongValue(
            "average: each adapter is merged on its own, so there is no mean", hint="leave out one of the two"
        )
    out = Path(options.out)
    options.spread.require()
    listed = several(adapters)
    names = names_of(listed)
    options, open_base = with_opened_base(options), cache(opened_model)
    done = []
    for each, name in zip(listed, names, strict=True):
        done.append(_merged(each, name, replace(options, out=out / name), caller, open_base))
        ended(done[-1])
    return tuple(done)


def _merged(
    adapter: Reference, name: str, options: MergeArguments, caller: Caller, open_base: Callable[[Path], ModelDir]
) -> MergedOne:
    """Merge one adapter, or plan that; an error of ours is in the result, any other is raised."""
    began, path, notes = time.monotonic(), Path(str(options.out)), list[str]()
    own = structs.replace(caller, note=notes.append, planned=lambda _: None, done=lambda _: None)
    became: dict[str, Any] = {}
    try:
        with errors_of_the_system(None, path):
            done = merge((adapter,), options, own, open_base=open_base)
            became["plan"] = done.plan if isinstance(done, Written | Planned) else None
            became["written"] = done if isinstance(done, Written) else None
    except LoraToolError as error:
        became["error"] = error
    return MergedOne(name=name, path=path, seconds=time.monotonic() - began, notes=tuple(notes), **became)


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
                hint="leave out the weight, or merge their sum",
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
