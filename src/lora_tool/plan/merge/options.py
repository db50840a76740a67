"""The options of a merge: those of its passes, and those of the work.

Each field of `MergeOptions` is an argument of the library's `merge`, an option of the commands `merge` and `ci`, and a
key of the block ``after: merge:`` in a run's YAML. `MergeArguments` adds what `ci` does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_tool.choices import codes, flag, positive, wrong_value
from lora_tool.cluster.spread import EngineName, Spread
from lora_tool.hub_names import ANYWHERE
from lora_tool.options import Options, option
from lora_tool.plan.merge.passes.base_as import BaseAs
from lora_tool.plan.merge.passes.deltas import Deltas
from lora_tool.plan.merge.passes.ends import Untie
from lora_tool.plan.merge.passes.head import ForTask
from lora_tool.plan.merge.passes.shards import Shards
from lora_tool.plan.merge.passes.steps import Cast
from lora_tool.plan.merge.passes.store import Store
from lora_tool.plan.merge.passes.text_only import TextOnly
from lora_tool.report.findings import Severity
from lora_tool.sources import Reference

SAME_RESULT: Mapping[str, Any] = {"jobs": None, "engine": "local", "address": None, "workers": None}
"""Options of the work, with their defaults: whatever they are, the same bytes are written."""


def severity(given: object) -> Severity:
    """Return the severity at which findings fail. Raises `WrongValue` for everything but "error" and "warning"."""
    if given not in (Severity.ERROR, Severity.WARNING):
        raise wrong_value("severity", given, [Severity.ERROR.value, Severity.WARNING.value])
    return Severity(given)


@dataclass(frozen=True, kw_only=True)
class _Rules(Options):
    """The rules that judge the inputs."""

    select: Iterable[str] = option((), "Run only these rules: LT206, or LT2 for all LT2xx.", parse=codes)
    ignore: Iterable[str] = option((), "Rules not to run.", parse=codes)
    fail_on: Severity | str = option(
        Severity.ERROR, "Fail on findings of this severity or worse.", parse=severity, metavar="[error|warning]"
    )


# the fields of the last base come first in a dataclass, and so in `--help`
@dataclass(frozen=True, kw_only=True)
class PlanOptions(_Rules, Shards, BaseAs, Store, TextOnly, Untie, Deltas, Cast, ForTask):
    """The options of `plan_merge`: what the merged model is. Raises `WrongValue` for a bad value."""


@dataclass(frozen=True, kw_only=True)
class _Places(Options):
    """Where a merge reads and writes."""

    out: str | os.PathLike[str] | None = option(
        None, "Folder to write.  [default: a `-merged` sibling]", name="output", short=("-o",), metavar="PATH"
    )
    base: Reference | None = option(
        None, f"Base model: {ANYWHERE}.  [default: what adapter_config.json names]", metavar="MODEL"
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(PlanOptions, _Places):
    """The options of a merge, for the library, the commands and run.yaml. Raises `WrongValue` for a bad value."""

    allow_in_memory: bool = option(
        default=False, text="Let PEFT merge what only PEFT can, with the whole model in memory.", parse=flag
    )
    jobs: int | None = option(None, "Number of workers.  [default: one per core]", parse=positive)
    engine: EngineName | str = option(
        EngineName.LOCAL, "Do the work on this machine, or on a Ray cluster that is running.", parse=EngineName
    )
    address: str | None = option(
        None,
        "Address of the Ray cluster.  [default: RAY_ADDRESS, else the cluster that this machine is part of]",
        parse=str,
        metavar="HOST:PORT",
    )
    workers: int | None = option(
        None, "Tasks that run at a time on the Ray cluster.  [default: one per CPU of the cluster]", parse=positive
    )
    overwrite: bool = option(
        default=False, text="Replace an existing output of lora-tool once the new one is complete.", parse=flag
    )

    @property
    def spread(self) -> Spread:
        """Where the work is done."""
        return Spread(engine=EngineName(self.engine), address=self.address, workers=self.workers)

    def rules(self) -> dict[str, Any]:
        """Return the options that choose the rules."""
        return {"select": self.select, "ignore": self.ignore, "fail_on": self.fail_on}

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spread  # which says what contradicts the engine


@dataclass(frozen=True, kw_only=True)
class MergeArguments(MergeOptions):
    """The options that only `merge` has, in the library and as a command."""

    verify: bool = option(
        default=True, text="Read samples back and check them before the output gets its name.", parse=flag
    )
    resume: bool = option(
        default=False, text="Reuse what a killed run finished; leave a finished output as it is.", parse=flag
    )

    def writing(self) -> dict[str, Any]:
        """Return the arguments of `write`."""
        values = {name: getattr(self, name) for name in ("verify", "jobs", "overwrite", "resume")}
        return values | {"spread": self.spread}
