"""Running pipelines: each stage in its turn, the first that fails ends one and no other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints.sources import opened_model
from lora_tool.core.display import as_options
from lora_tool.core.errors import FindingsFound, LoraToolError, of_system
from lora_tool.core.progress import StageWatch, unwatched
from lora_tool.plans.core.plan import Plan
from lora_tool.workflows.ci.jobs import StageCache, sweep_of
from lora_tool.workflows.ci.model import Job, Outcome, Stage, Status, Swept
from lora_tool.workflows.ci.stages import Stages
from lora_tool.workflows.merge import with_opened_base

STAGES = ("open", "validate", "consolidate", "merge", "verify", "push")


def ci(
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
    return _outcome(job, Stages(job, watch, on_plan), on_stage)


def ci_each(
    job: Job,
    *,
    left_out: Callable[[Path, str], None] = lambda *_: None,
    on_stage: Callable[[Job, Stage], None] = lambda *_: None,
    on_plan: Callable[[Plan], None] = lambda _: None,
    watch: StageWatch = unwatched,
) -> tuple[Swept, ...]:
    """Run the pipeline of every adapter and checkpoint under that of `job`, and return what became of each.

    What stops one stops no other. The base is opened once. `left_out` is called with each folder that has no run, and
    why. Raises as `sweep_of`, and `CheckpointError` for a base that is given and cannot be read.
    """
    sweep = sweep_of(job)
    for folder, what in sweep.left_out.items():
        left_out(folder, what)
    options = with_opened_base(job.options, near=Path(sweep.jobs[0].checkpoint))
    open_base = cache(opened_model)
    done = []
    for one in sweep.jobs:
        stages = Stages(replace(one, options=options), watch, on_plan, open_base)
        done.append(Swept(job=one, outcome=_outcome(one, stages, partial(on_stage, one))))
    return tuple(done)


def _outcome(job: Job, steps: Stages, on_stage: Callable[[Stage], None]) -> Outcome:
    ended: list[Stage] = []
    for name in STAGES:
        if any(stage.status is Status.FAILED for stage in ended):
            ended.append(Stage(name=name, status=Status.SKIPPED, summary="not reached"))
            continue
        began = time.monotonic()
        stage = _tried(name, getattr(steps, name))
        ended.append(replace(stage, seconds=time.monotonic() - began))
        on_stage(ended[-1])
    StageCache(job.output).close()
    passed = all(stage.status is not Status.FAILED for stage in ended)
    return Outcome(stages=tuple(ended), output=steps.result if passed and not job.options.dry_run else None)


def _tried(name: str, step: Callable[[], Stage]) -> Stage:
    """Return the stage, or what the error that ended it makes of it."""
    try:
        return step()
    except (LoraToolError, OSError) as raised:
        error = of_system(raised) if isinstance(raised, OSError) else raised
    if isinstance(error, FindingsFound) and error.report is not None:
        return Stage(name=name, status=Status.FAILED, summary=error.report.counts(), report=error.report)
    error.hint = error.hint and as_options(error.hint)
    return Stage(name=name, status=Status.FAILED, summary=as_options(str(error)), error=error)
