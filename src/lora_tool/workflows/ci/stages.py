"""The stages of a pipeline: each takes one checkpoint, and hands its result to the next."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.checkpoints import (
    TRAINED_MODEL,
    AdapterDir,
    Checkpoint,
    ModelDir,
    NamedAdapters,
    RunDir,
    ShardedDir,
    open_checkpoint,
    open_sharded,
    saves_in,
)
from lora_tool.checkpoints.sources import Wanted, located, may_hold, opened_model, several_adapters, unfetched
from lora_tool.core.display import as_options, counted, size
from lora_tool.core.errors import (
    FindingsFound,
    NotACheckpoint,
    OutputExists,
    UnsupportedAdapter,
    UnsupportedCheckpoint,
    VerificationFailed,
)
from lora_tool.core.progress import StageWatch
from lora_tool.core.report.findings import Finding, Severity
from lora_tool.core.report.model import Report
from lora_tool.execution.folder import check_output
from lora_tool.models.ends import LANGUAGE_MODELS
from lora_tool.plans.base.task import CLASSIFIERS, Task, names_classifier
from lora_tool.plans.consolidate.plan_consolidate import StateOptions, plan_consolidate
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.adapter.lt3_head import head_weight
from lora_tool.rules.consolidating import is_about_rank_files
from lora_tool.rules.judging import OF_TIED
from lora_tool.rules.training.saves import better_checkpoint
from lora_tool.verification.validating import validate
from lora_tool.workflows.caller import Caller
from lora_tool.workflows.ci.jobs import StageCache, has_rank_files, key_of
from lora_tool.workflows.ci.model import Job, Ranked, Stage, Status
from lora_tool.workflows.merge import FoundInputs, merge_inputs, planned
from lora_tool.workflows.push import PublishOptions, push
from lora_tool.workflows.writing import write
from lora_tool.workflows.written import Written, farthest

if TYPE_CHECKING:
    from lora_tool.core.report.findings import Run
    from lora_tool.verification.verified import Verification


class Stages:
    """The stages of one run. Each returns what became of it, and raises `LoraToolError` or OSError where it failed."""

    def __init__(
        self,
        job: Job,
        watch: StageWatch,
        on_plan: Callable[[Plan], None],
        open_base: Callable[[Path], ModelDir] = opened_model,
    ) -> None:
        self._job = job
        self._watch = watch
        self._on_plan = on_plan
        self._open_base = open_base
        self._cache = StageCache(job.output)
        self._root = Path(job.checkpoint)
        self._opened: Checkpoint | None = None
        self._needs_consolidation = False
        self._merged: FoundInputs | None = None
        self.result: Path | None = None
        """The folder that the run has made, or found good as it is."""

    @property
    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            raise AssertionError("the first stage opens the checkpoint")
        return self._opened

    def open(self) -> Stage:
        """Open the checkpoint; of a run folder without finished weights, take the best one that is whole."""
        job = self._job
        job.options.spread.require()
        if job.options.push is not None:
            from lora_tool.hub.session import require_client  # slow to import

            require_client()  # before hours of reading, as everything that can be known then
        self._root = located(job.checkpoint, Wanted.ADAPTER).path
        opened = open_checkpoint(self._root)
        summary = f"{opened.kind} {job.checkpoint}"
        if isinstance(opened, RunDir):
            self._root, why = self._best(opened)
            opened = open_checkpoint(self._root)
            summary = f"run folder {job.checkpoint}: taking {self._root.name} ({why})"
        elif isinstance(opened, AdapterDir | ModelDir) and saves_in(opened.folder):
            summary += _better_than(opened, self._judged(opened, checkpoints=True).runs[0])
        if isinstance(opened, NamedAdapters):
            if len(opened.adapters) > 1:
                raise several_adapters(self._root, opened.adapters, "ci")
            self._root, opened = opened.adapters[0].root, opened.adapters[0]
        if not isinstance(opened, ModelDir):
            ours = job.options.overwrite or bool(self._cache)
            check_output(job.output, overwrite=ours, inputs=(self._root,))  # before hours of reading
        self._opened = opened
        return Stage(name="open", status=Status.PASSED, summary=summary)

    def _best(self, run: RunDir) -> tuple[Path, str]:
        """Return the run's best whole checkpoint and why; without one, the latest that its rank files can mend."""
        (table,) = self._judged(run).runs
        if table.best is not None:
            return Path(table.best), table.why_best or "the only one"
        for row in reversed(table.checkpoints):
            opened = open_checkpoint(row.path)
            if has_rank_files(opened) and _curable(self._judged(opened).at_least(Severity.ERROR)):
                return Path(row.path), "the latest, because its rank files hold what its weights lack"
        names = ", ".join(row.name for row in table.checkpoints)
        loaded = next((row for row in reversed(table.checkpoints) if row.loadable), None)
        taken = (
            ""
            if loaded is None
            else f"; the weights of {loaded.name} can be used: lora-tool ci {shlex.quote(loaded.path)}"
        )
        raise NotACheckpoint(
            f"{run.root}: no checkpoint is complete and without errors: {names}",
            hint=f"lora-tool validate {shlex.quote(str(run.root))}{taken}",
        )

    def validate(self) -> Stage:
        """Judge the checkpoint. Faults of an adapter next to its rank files are for `consolidate` to mend."""
        job, opened = self._job, self._checkpoint
        report = self._judged(opened)
        failing = report.at_least(job.fail_on)
        reassemble = bool(failing) and has_rank_files(opened)
        self._needs_consolidation = isinstance(opened, ShardedDir) or reassemble
        if job.fails(report) and not (reassemble and _curable(failing)):
            return Stage(name="validate", status=Status.FAILED, summary=_counts_and_skipped(report), report=report)
        what = "; the rank files beside it will be reassembled" if failing else ""
        # findings that consolidating mends are not the run's: the new adapter is judged again
        kept = replace(report, findings=()) if failing else report
        return Stage(name="validate", status=Status.PASSED, summary=_counts_and_skipped(report, what), report=kept)

    def _judged(self, opened: Checkpoint, *, checkpoints: bool = False) -> Report:
        job, options = self._job, self._job.options
        base = options.base
        if isinstance(base, str) and unfetched(base, self._root).hub_id is not None and not may_hold(base):
            base = None  # the merge downloads it, and judges both
        return validate(
            opened,
            base=base,
            near=self._root,
            task=options.task,
            num_labels=options.num_labels,
            select=options.select,
            ignore=(*options.ignore, *(OF_TIED if options.untie else ())),
            deep=None if checkpoints else job.options.deep,
            servers=job.options.servers,
            checkpoints=checkpoints,
        )

    def consolidate(self) -> Stage:
        """Put rank files together, where there is nothing better, and judge the result."""
        if not self._needs_consolidation:
            return Stage(name="consolidate", status=Status.SKIPPED, summary="not needed")
        job = self._job
        options = job.options
        config = [Path(options.adapter_config).parent] if options.adapter_config else []
        decides = ("consolidate", options.ignore, options.tag, options.lora_alpha)
        key = key_of(decides, [self._root, *config], own=job.own)
        for folder in (job.consolidated, job.output):
            done = self._cache.summary("consolidate", key, folder)
            if done is not None:
                return self._put_together(folder, Status.REUSED, done)
        settings = StateOptions(
            tag=options.tag,
            adapter_config=options.adapter_config,
            lora_alpha=options.lora_alpha,
            ignore=options.ignore,
        )
        plan = plan_consolidate(open_sharded(self._root), settings)
        folder = job.consolidated if plan.manifest["what"] == "adapter" else job.output
        if job.options.dry_run:
            return self._planned("consolidate", plan, folder)
        self._write("consolidate", key, plan, folder)
        summary = f"{plan.notes[0]}: {folder}, {size(plan.data_bytes)}"
        stage = self._put_together(folder, Status.PASSED, summary)
        if stage.status is Status.PASSED:
            self._cache.keep("consolidate", key, folder, stage.summary)
        return stage

    def _put_together(self, folder: Path, status: Status, summary: str) -> Stage:
        self._opened = open_checkpoint(folder)
        report = self._judged(self._opened)
        if self._job.fails(report):
            return Stage(name="consolidate", status=Status.FAILED, summary=_counts_and_skipped(report), report=report)
        return Stage(name="consolidate", status=status, summary=summary, report=report)

    def merge(self) -> Stage:
        """Merge the adapter into its base; samples are read back before the folder gets its name."""
        job, opened = self._job, self._checkpoint
        if job.options.dry_run and self._needs_consolidation:
            return Stage(
                name="merge", status=Status.SKIPPED, summary="to be planned once its rank files are consolidated"
            )
        if not isinstance(opened, AdapterDir):
            self.result = opened.folder.root
            self._require_task(opened)
            whole = "a whole model" if opened.kind is TRAINED_MODEL else f"a {opened.kind}"
            whole = "a whole model" if self._needs_consolidation else whole
            return Stage(name="merge", status=Status.SKIPPED, summary=f"not needed: it is {whole}")
        inputs = merge_inputs(opened, job.options.base, near=self._root, open_base=self._open_base)
        key = key_of(("merge", job.options.merging), inputs.paths, own=job.own)
        self._merged, self.result = inputs, job.output
        done = self._cache.summary("merge", key, job.output)
        if done is not None:
            kept = self._cache.warnings("merge")
            return Stage(name="merge", status=Status.REUSED, summary=done, warnings=kept)
        notes: list[str] = []
        with planned(inputs, job.options, job.output, dry_run=job.options.dry_run, note=notes.append) as plan:
            if plan is None:
                return Stage(name="merge", status=Status.PLANNED, summary=notes[-1])
            if job.pairs is not None and plan.manifest["task"] != Task.SEQ_CLS:
                raise UnsupportedAdapter(
                    f"{opened.root} is not a reward model: merged, it is a {plan.manifest['task']} model, but --pairs "
                    "ranks texts by rewards"
                )
            if job.options.dry_run:
                return self._planned("merge", plan, job.output)
            written = self._write("merge", key, plan, job.output)
        summary = _counts_of(plan, job.output)
        warnings = tuple(map(as_options, (*notes, *written.warnings)))
        self._cache.keep("merge", key, job.output, summary, warnings)
        return Stage(name="merge", status=Status.PASSED, summary=summary, warnings=warnings)

    def _planned(self, name: str, plan: Plan, folder: Path) -> Stage:
        self._on_plan(plan)
        return Stage(name=name, status=Status.PLANNED, summary=_counts_of(plan, folder), warnings=plan.warnings)

    def _require_task(self, opened: Checkpoint) -> None:
        """Raise `UnsupportedCheckpoint` where a model that needs no merge is of another class than requested."""
        if not isinstance(opened, ModelDir):
            return
        wanted, config = Task(self._job.options.task), opened.config
        name = config.architectures[0] if config and config.architectures else ""
        generates = name.endswith(LANGUAGE_MODELS) or not (name or head_weight(opened.tensors))
        if (wanted in CLASSIFIERS and generates) or (wanted is Task.CAUSAL_LM and names_classifier((name,))):
            what = f"is a {name}" if name else "has no classification head"
            raise UnsupportedCheckpoint(
                f'{opened.root} {what}, but `task="{wanted}"` was requested',
                hint="omit the task, or give a checkpoint of that task",
            )

    def _write(self, name: str, key: str, plan: Plan, folder: Path) -> Written:
        """Carry the plan out. An existing folder is replaced if this very stage left it before it was cut off.

        Raises `OutputExists` for one of an earlier run that is not, and as `write` does.
        """
        options, watch = self._job.options, self._watch
        overwrite = options.overwrite or self._cache.begun(name, key)
        if folder.exists() and not overwrite and self._cache:
            raise OutputExists(
                f"{folder} was written by an earlier run from other inputs or with other options",
                hint="replace it with `overwrite=True`, or give another folder",
            )
        if not folder.exists():
            self._cache.begin(name, key)
        self._on_plan(plan)
        return write(
            plan,
            folder,
            jobs=options.jobs,
            overwrite=overwrite,
            spread=options.spread,
            watch=lambda _, nbytes: watch(name, nbytes),
        )

    def verify(self) -> Stage:
        """Compare every value of the merged model with base and adapter, and rank the pairs that were given."""
        job, merged = self._job, self._merged
        if job.options.dry_run:
            return Stage(name="verify", status=Status.SKIPPED, summary="nothing was merged")
        if merged is None or self.result is None:
            return self._rank_alone()
        from lora_tool.plans.merge.provenance import find_inputs
        from lora_tool.verification.verified import summary_json
        from lora_tool.verification.verifying import verify_inputs

        options = ("verify", job.options.ignore, job.options.fail_on, job.options.strict, job.pairs)
        key = key_of(options, [*merged.paths, self.result], own=job.own)
        done, ranking = self._cache.summary("verify", key, self.result), self._cache.ranking("verify")
        if done is not None and (job.pairs is None or ranking is not None):
            return Stage(name="verify", status=Status.REUSED, summary=done, ranking=ranking)
        adapters = [str(each.root) for each in merged.adapters]
        base = str(merged.base_source.path)
        inputs = find_inputs(self.result, base=base, adapters=adapters, open_base=self._open_base)
        found = verify_inputs(
            inputs,
            ignore=job.options.ignore,
            pairs=job.pairs,
            jobs=job.options.jobs,
            spread=job.options.spread,
            watch=self._watch,
        )
        seen = summary_json(found)
        summary = f"{seen['right']} of {seen['tensors']} tensors match, every value compared{farthest(seen)}{_ranking_of(found)}"
        stage = self._proven(found, summary)
        if stage.status is Status.PASSED:
            self._cache.keep("verify", key, self.result, summary, ranking=stage.ranking)
        return stage

    def _rank_alone(self) -> Stage:
        job, opened = self._job, self._checkpoint
        if job.pairs is None:
            return Stage(name="verify", status=Status.SKIPPED, summary="nothing was merged")
        if not isinstance(opened, ModelDir):
            raise UnsupportedCheckpoint(f"{opened.folder.root} is a {opened.kind}, but --pairs needs a reward model")
        from lora_tool.verification.verifying import judged_alone

        found = judged_alone(opened, job.pairs, ignore=job.options.ignore, watch=self._watch)
        return self._proven(found, f"nothing was merged{_ranking_of(found)}")

    def _proven(self, found: Verification, summary: str) -> Stage:
        failing = found.report.at_least(self._job.fail_on)
        pairs = found.pairs
        ranking = None if pairs is None else Ranked.of(pairs.merged)
        if not self._job.fails(found.report):
            return Stage(name="verify", status=Status.PASSED, summary=summary, report=found.report, ranking=ranking)
        kind = VerificationFailed if found.says_wrong(self._job.fail_on) else FindingsFound
        error = kind(str(failing[0]), hint=failing[0].hint) if failing else None
        return Stage(
            name="verify", status=Status.FAILED, summary=summary, report=found.report, ranking=ranking, error=error
        )

    def push(self) -> Stage:
        """Publish the result in one commit; the same content again makes none."""
        job, options = self._job, self._job.options
        if options.push is None or self.result is None or options.dry_run:
            why = "a dry run" if options.push and options.dry_run else "not asked for"
            return Stage(name="push", status=Status.SKIPPED, summary=why)
        wanted = PublishOptions(
            private=options.private,
            revision=options.revision,
            create_pr=options.create_pr,
            select=options.select,
            ignore=options.ignore,
            fail_on=job.fail_on,
        )
        caller = Caller(progress=lambda _, nbytes: self._watch("push", nbytes))
        done = push(self.result, options.push, wanted, caller).done
        if done is None:
            raise AssertionError("no dry run")
        status = Status.PASSED if done.changed else Status.REUSED
        return Stage(name="push", status=status, summary=f"{done.url} at {done.commit[:12]}")


def _counts_and_skipped(report: Report, what: str = "") -> str:
    return report.counts() + what + (f", {counted(len(report.skipped), 'rule')} skipped" if report.skipped else "")


def _curable(findings: Iterable[Finding]) -> bool:
    """Return whether rank files can mend what was found: everything but faults of their own."""
    return not any(map(is_about_rank_files, findings))


def _counts_of(plan: Plan, folder: Path) -> str:
    counts = ", ".join(f"{count} {action}" for action, count in plan.counts().items() if action != "consumed")
    return f"{counts}: {folder}, {size(plan.data_bytes)}"


def _ranking_of(found: Verification) -> str:
    pairs = found.pairs
    if pairs is None:
        return ""
    before = "" if pairs.unmerged is None else f", base + adapter {pairs.unmerged.accuracy:.3f}"
    return f"; {pairs.merged.accuracy:.3f} of {counted(len(pairs.lines), 'pair')} ranked right{before}"


def _better_than(finished: Checkpoint, run: Run) -> str:
    """Return that a checkpoint of the run is better than its `finished` weights, which are taken; "" where none is."""
    best = better_checkpoint(finished, run)
    if best is None:
        return ""
    command = f"lora-tool ci {shlex.quote(str(best))}"
    return f": taking its finished weights; the best is {best.name} ({run.why_best}): {command}"
