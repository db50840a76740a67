"""Running pipelines: each stage in its turn, the first that fails ends one; several merge in passes over their base."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.display import as_options
from lora_tool.errors import FindingsFound, LoraToolError, of_system
from lora_tool.pipeline.merging import with_opened_base
from lora_tool.pipeline.model import Job, Outcome, Stage, Status, Swept
from lora_tool.pipeline.passes import Passes
from lora_tool.pipeline.stage_cache import StageCache
from lora_tool.pipeline.stages import Merging, Stages
from lora_tool.plan.core.plan import Plan
from lora_tool.progress import StageWatch, unwatched
from lora_tool.sources import opened_model

BEFORE_MERGE = ("open", "validate", "consolidate")
AFTER_MERGE = ("verify", "push")


def run(
    job: Job,
    *,
    on_stage: Callable[[Stage], None] = lambda _: None,
    on_plan: Callable[[Plan], None] = lambda _: None,
    watch: StageWatch = unwatched,
) -> Outcome:
    """Run the pipeline and return what became of every stage; `on_stage` is called with each as it ends, `on_plan` with
    what will be written before it is, `watch` for the progress of what takes long.

    A stage that an earlier run did from the same inputs, and whose result is as it was left, is not done again. What
    stops the pipeline is in the outcome, not raised; an interrupt is.
    """
    running = _Running(job, Stages(job, watch, on_plan), on_stage)
    running.do(*BEFORE_MERGE, "merge", *AFTER_MERGE)
    return running.outcome()


def run_each(
    jobs: Sequence[Job],
    *,
    on_stage: Callable[[Job, Stage], None] = lambda *_: None,
    on_plan: Callable[[Plan], None] = lambda _: None,
    watch: StageWatch = unwatched,
) -> tuple[Swept, ...]:
    """Run the pipeline of every job of a sweep, whose options are the same, and return what became of each.

    What stops one stops no other. All are validated and planned before one is merged, and up to eight are merged in one
    pass over their base, then verified. Raises `OutOfSpace` before the merges where the disk has no room for all of
    them, and `CheckpointError` for a base that is given and cannot be read.
    """
    options = with_opened_base(jobs[0].options, near=jobs[0].checkpoint)
    passes = Passes(spread=options.spread, jobs=options.jobs, one_by_one=options.allow_in_memory, watch=watch)
    open_base = cache(opened_model)
    all_of_them = []
    for job in jobs:
        stages = Stages(replace(job, options=options), watch, on_plan, open_base)
        all_of_them.append(_Running(job, stages, partial(on_stage, job)))
    with contextlib.ExitStack() as interrupted:
        for together in passes.planned_together(all_of_them):
            for one in together:
                one.do(*BEFORE_MERGE)
                one.plan_merge()
                if one.merging is None:
                    one.do(*AFTER_MERGE)
                else:
                    interrupted.push(one.merging.contexts)  # what ends everything closes what was begun
            _merge([one for one in together if one.merging is not None], passes)
    return tuple(Swept(job=one.job, outcome=one.outcome()) for one in all_of_them)


def _merge(going: Sequence[_Running], passes: Passes) -> None:
    groups = passes.groups(going)
    passes.require_room([[one.merging for one in group if one.merging is not None] for group in groups])
    for group in groups:
        merges = [one.begin_writing() for one in group]
        passes.write(merges)
        for one in group:
            one.end_merge()
            one.do(*AFTER_MERGE)


class _Running(Struct):
    """One pipeline on its way: the stages that have ended, and the merge that is planned."""

    job: Job
    steps: Stages
    on_stage: Callable[[Stage], None]
    ended: list[Stage] = field(default_factory=list)
    merging: Merging | None = None

    def do(self, *names: str) -> None:
        """Do these stages, unless one has failed before."""
        for name in names:
            if self._has_failed:
                self.ended.append(Stage(name=name, status=Status.SKIPPED, summary="not reached"))
                continue
            step: Callable[[], Stage] = getattr(self.steps, name)
            began = time.monotonic()
            stage = _tried(name, step)
            self._end(replace(stage, seconds=time.monotonic() - began))

    @property
    def _has_failed(self) -> bool:
        return any(stage.status is Status.FAILED for stage in self.ended)

    def _end(self, stage: Stage) -> None:
        self.ended.append(stage)
        self.on_stage(stage)

    def plan_merge(self) -> None:
        """Plan the merge; where nothing is to be written, that is its stage."""
        if self._has_failed:
            self.do("merge")
            return
        began = time.monotonic()
        try:
            found = self.steps.plan_merge()
        except (LoraToolError, OSError) as error:
            found = _failed("merge", error)
        seconds = time.monotonic() - began
        if isinstance(found, Stage):
            self._end(replace(found, seconds=seconds))
        else:
            found.seconds = seconds
            self.merging = found

    def begin_writing(self) -> Merging:
        """Return the merge that is planned, whose writing begins."""
        if self.merging is None:
            raise AssertionError("only what is planned is written")
        with self.merging.tried():
            self.steps.begin_writing(self.merging)
        return self.merging

    def end_merge(self) -> None:
        """Take in how the merge ended."""
        merging = self.merging
        if merging is None:
            raise AssertionError("only what is planned is written")
        stage = _tried("merge", lambda: self.steps.merged(merging))
        self._end(replace(stage, seconds=merging.seconds))

    def outcome(self) -> Outcome:
        """Return what became of every stage, once all have ended."""
        StageCache(self.job.output).close()
        passed = not self._has_failed
        return Outcome(stages=tuple(self.ended), output=self.steps.result if passed and not self.job.dry_run else None)


def _tried(name: str, step: Callable[[], Stage]) -> Stage:
    try:
        return step()
    except (LoraToolError, OSError) as error:
        return _failed(name, error)


def _failed(name: str, error: LoraToolError | OSError) -> Stage:
    """Return the stage that this error ended."""
    if isinstance(error, OSError):
        error = of_system(error)
    if isinstance(error, FindingsFound) and error.report is not None:
        return Stage(name=name, status=Status.FAILED, summary=error.report.counts(), report=error.report)
    error.hint = error.hint and as_options(error.hint)
    return Stage(name=name, status=Status.FAILED, summary=as_options(str(error)), error=error)
