"""The words of a pipeline run: what was asked for, and what became of each stage."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from msgspec import Struct, field

from lora_tool.core.choices import TextEnum
from lora_tool.core.errors import LoraToolError
from lora_tool.core.options import declared, option
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.model import Report
from lora_tool.hub.options import BranchOptions
from lora_tool.plans.consolidate.plan_consolidate import RankFileOptions
from lora_tool.plans.merge.options import SAME_RESULT, MergeOptions
from lora_tool.rules.merged.pairs import Ranking
from lora_tool.verification.pairs import Pairs
from lora_tool.workflows.verify import PairOptions


@dataclass(frozen=True, kw_only=True)
class CiOptions(MergeOptions, PairOptions, RankFileOptions, BranchOptions):
    """The options of a pipeline: those of its stages, and what is published."""

    strict: bool = option(default=False, text="Fail on rules that could not run, too.", library_only=True)
    deep: bool | None = option(None, "Read all weights, or none; None reads those of adapters.", library_only=True)
    servers: frozenset[str] = option(frozenset(), "Servers that will serve the result.", library_only=True)
    push: str | None = option(None, "Repository on the Hub to publish the result to.", library_only=True)
    dry_run: bool = option(default=False, text="Judge and plan only: nothing is written.", library_only=True)
    reports: tuple[Path, ...] = option(
        (), "Files written about the run: they may lie in the checkpoint, and are no part of it.", library_only=True
    )

    @property
    def merging(self) -> MergeOptions:
        """Those of the merge alone that decide its bytes, wherever its folders are."""
        own = {name: getattr(self, name) for name in declared(MergeOptions)}
        return MergeOptions(**{**own, **SAME_RESULT, "out": None, "base": None, "overwrite": False})


class Job(Struct, frozen=True, kw_only=True):
    """What is to be done with one checkpoint."""

    checkpoint: str | Path
    """A folder or a Hub id."""
    output: Path
    options: CiOptions = field(default_factory=CiOptions)
    pairs: Pairs | None = None
    """What the result must rank right, of a reward model; None asks nothing of it."""
    sweep: Path | None = None
    """The folder of all outputs, where this is one job of several."""

    @property
    def fail_on(self) -> Severity:
        return Severity(self.options.fail_on)

    def fails(self, report: Report) -> bool:
        """Return whether a stage with this report fails: for a finding, and if `strict` for a rule that could not run."""
        return bool(report.at_least(self.fail_on) or (self.options.strict and report.skipped))

    @property
    def consolidated(self) -> Path:
        """Where an adapter goes that had to be put together from rank files first."""
        return self.output.parent / f"{self.output.name}-adapter"

    @property
    def own(self) -> tuple[Path, ...]:
        """What the run itself writes, wherever that lies."""
        return (self.output, self.consolidated, *self.options.reports, *((self.sweep,) if self.sweep else ()))


@enum.unique
class Status(TextEnum):
    """What became of a stage."""

    PASSED = "passed"
    PLANNED = "planned"
    """What a dry run would do."""
    REUSED = "reused"
    """It was done by an earlier run, from the same inputs, and its result is as it was left."""
    SKIPPED = "skipped"
    FAILED = "failed"


class Ranked(Struct, frozen=True, kw_only=True):
    """How well a reward model ranked the pairs that were given."""

    accuracy: float
    """Share of pairs whose chosen text got the higher reward; a tie counts half."""
    margin: float | None
    """The mean margin; None where no pair has one."""

    @classmethod
    def of(cls, ranking: Ranking) -> Ranked:
        """Return what is compared of a model's rewards."""
        margin = ranking.mean_margin
        return cls(accuracy=ranking.accuracy, margin=margin if math.isfinite(margin) else None)

    @property
    def cells(self) -> tuple[str, str]:
        return f"{self.accuracy:.3f}", "" if self.margin is None else f"{self.margin:+.3f}"

    @property
    def order(self) -> tuple[float, float]:
        """What sorts the best model first: by accuracy, then by margin."""
        return -self.accuracy, math.inf if self.margin is None else -self.margin


class Stage(Struct, frozen=True, kw_only=True):
    """One stage that was run, or why it was not. `error` is what stopped the pipeline there."""

    name: str
    status: Status
    summary: str
    seconds: float = 0.0
    report: Report | None = None
    warnings: tuple[str, ...] = ()
    """What is no finding of a rule, and should be known all the same."""
    ranking: Ranked | None = None
    """How the pairs were ranked, where there were any."""
    error: LoraToolError | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    """All stages in order. `output` is the folder that passed; None where the pipeline stopped before it."""

    stages: tuple[Stage, ...]
    output: Path | None = None

    @property
    def passed(self) -> bool:
        return all(stage.status is not Status.FAILED for stage in self.stages)

    @property
    def error(self) -> LoraToolError | None:
        """What stopped the pipeline; None where it passed, or where findings did."""
        return next((stage.error for stage in self.stages if stage.error is not None), None)

    @property
    def failed(self) -> Stage | None:
        return next((stage for stage in self.stages if stage.status is Status.FAILED), None)

    @property
    def ranking(self) -> Ranked | None:
        """How the pairs were ranked; None where none were given, or the pipeline stopped before that."""
        return next((stage.ranking for stage in self.stages if stage.ranking is not None), None)


class Swept(Struct, frozen=True, kw_only=True):
    """What became of one job of several."""

    job: Job
    outcome: Outcome

    @property
    def name(self) -> str:
        return self.job.output.name


def best_first(swept: Iterable[Swept]) -> tuple[Swept, ...]:
    """Return those that ranked pairs, the best first: by accuracy, then by mean margin, then by name."""
    ranked = ((each.outcome.ranking, each) for each in swept)
    measured = [((*found.order, each.name), each) for found, each in ranked if found is not None]
    return tuple(each for _, each in sorted(measured, key=itemgetter(0)))


def in_order(swept: Iterable[Swept]) -> tuple[Swept, ...]:
    """Return all of them as a table lists them: the ranked ones, best first, then the others as they are."""
    listed = tuple(swept)
    ranked = best_first(listed)
    return (*ranked, *(each for each in listed if each.outcome.ranking is None))


def best_of(swept: Iterable[Swept]) -> Swept | None:
    """Return the one that passed and ranked the pairs best, None where none did."""
    return next((each for each in best_first(swept) if each.outcome.passed), None)
