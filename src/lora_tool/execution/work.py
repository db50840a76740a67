"""The interface of engines: an engine writes the weight files of a plan, on any machine and with any number of workers.

Everything that it is given is plain data, which can be pickled and sent to any machine that sees the same files: the
plan, its units (`units_of`) and the parts of the check of values. `Worker` carries out units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from lora_tool.core.progress import Progress
from lora_tool.core.report import Finding
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard
from lora_tool.rules.training.value_check import ValuePart


class Work(Struct, frozen=True, kw_only=True):
    """The work to do for one folder."""

    plan: Plan
    folder: Path
    """Where the files are written: it exists."""
    digest: str
    """The plan's, in the folder's journal: records of other plans there do not count."""
    shards: tuple[Shard, ...]
    """Those of the plan that are to be written."""
    checks: tuple[ValuePart, ...] = ()
    """Checks of the inputs' values: they need the processor while writing needs the disk, so they run side by side."""


class WorkDone(Struct, frozen=True, kw_only=True):
    """The results of the work."""

    hashes: Mapping[Path, str]
    """The sha256 of each of `plan.hashed`."""
    findings: Sequence[Finding]
    """The findings of the `checks`, in their order."""


Finished = Callable[[Shard, Mapping[str, DeltaRetention]], None]
"""Called when a shard is on the disk, with how much of each change survived rounding; by one thread at a time."""


class Engine(Protocol):
    """Writes the weight files of a plan: `execute(engine=…)` takes any class with this method."""

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """Return when every file of `work.shards` is on the disk, `finished` called for each.

        `progress` is called with the bytes that were written or checked. Raises the first error of any worker, after
        all others have stopped; `SourceChanged` where an input is not as the plan saw it.
        """
