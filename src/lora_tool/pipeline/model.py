"""The words of a pipeline run: what was asked for, and what became of each stage."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from lora_tool.choices import TextEnum
from lora_tool.errors import LoraToolError
from lora_tool.plan.merge.options import MergeOptions
from lora_tool.report.findings import Severity
from lora_tool.report.model import Report
from lora_tool.rules.engine.subjects import Server
from lora_tool.verification.pairs import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done with one checkpoint. `push` is a repository on the Hub; None publishes nothing."""

    checkpoint: Path
    output: Path
    options: MergeOptions = field(default_factory=MergeOptions)
    tag: str | None = None
    """Which saved step of a DeepSpeed checkpoint; None for the one that it calls the latest."""
    pairs: Pairs | None = None
    """What the result must rank right, of a reward model; None asks nothing of it."""
    adapter_config: Path | None = None
    """For rank files that have no `adapter_config.json` beside them."""
    lora_alpha: float | None = None
    """For rank files where no file tells it."""
    deep: bool | None = None
    """Whether all weights are read, or none; None for those of adapters."""
    servers: frozenset[Server] = frozenset()
    push: str | None = None
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    dry_run: bool = False
    """Judge and plan only: nothing is written."""
    reports: tuple[Path, ...] = ()
    """Files that are written about the run: they may lie in the checkpoint, and are no part of it."""

    @property
    def fail_on(self) -> Severity:
        """The severity at which a finding stops the pipeline."""
        return Severity(self.options.fail_on)

    @property
    def consolidated(self) -> Path:
        """Where an adapter goes that had to be put together from rank files first."""
        return self.output.with_name(f"{self.output.name}-adapter")

    @property
    def own(self) -> tuple[Path, ...]:
        """What the run itself writes, wherever that lies."""
        return (self.output, self.consolidated, *self.reports)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage that was run, or why it was not. `error` is what stopped the pipeline there."""

    name: str
    status: Status
    summary: str
    seconds: float = 0.0
    report: Report | None = None
    warnings: tuple[str, ...] = ()
    """What is no finding of a rule, and should be known all the same."""
    error: LoraToolError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
