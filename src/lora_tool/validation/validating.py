"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoint import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    RunDir,
    ShardedDir,
    open_checkpoint,
)
from lora_tool.errors import LoraToolError, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.exhaustive import assert_never
from lora_tool.formats.files import inside
from lora_tool.plan.base.task import Task
from lora_tool.progress import Watch, decided
from lora_tool.report import Report
from lora_tool.report.model import joined
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.engine.subjects import ModelSubject, RunSubject, Server
from lora_tool.rules.judging import Judge, unopened
from lora_tool.rules.training.saves import FINISHED, Judged, judged, run_table
from lora_tool.rules.training.sharded_subject import sharded_subject
from lora_tool.sources import Reference, opened, opened_adapter, opened_model
from lora_tool.validation.bases import named_base


class Criteria(Struct, frozen=True, kw_only=True):
    """How a folder is checked: which rules run, what they read, and which servers will serve it. See `validate`."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    deep: bool | None = None
    servers: frozenset[Server] = frozenset()


_READS = {
    True: "weights: all are read",
    False: "weights: none are read, headers only",
    None: "weights: those of adapters are read; of models and rank files only the headers",
}


def validate(
    checkpoint: Reference,
    *,
    base: Reference | None = None,
    adapters: Sequence[Reference] = (),
    num_labels: int | None = None,
    task: Task | str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    deep: bool | None = None,
    servers: Iterable[Server] = (),
    checkpoints: bool = False,
    progress: Callable[[int], None] | None = None,
    watch: Watch | None = None,
    near: Path | None = None,
) -> Report:
    """Return all findings of the rules on `checkpoint`; nothing is changed, and no code is run.

    Every checkpoint may be a path, a Hub id or an opened checkpoint; a base is never downloaded. `base` enables the
    rules that compare with it; None means the base that the adapter names, if it is on this disk. A relative path of
    the base is looked for in the working directory and in `near`, by default the adapter's folder. `adapters` are the
    ones a model was merged with, which is then compared with what base and adapters give; for an adapter, they are the
    ones it is to be merged together with. `task` "reward" expects a reward model with one label, "seq-cls" and
    "causal-lm" such models; `num_labels` are the rows that the head must have. `select` are the only rules to run,
    `ignore` the rules not to run. `deep` True reads all weights, False none, None only those of adapters. `servers`
    enables the rules of the servers that serve the adapter unmerged. Rules that could not run are in `skipped`. The
    checkpoints of a run folder are judged one by one, with `checkpoints` also those beside finished weights, and put
    into one table of `runs`. `progress` is called with the bytes that were read, where they are many; `watch` is called
    for the progress of reading rank files. Raises `CheckpointError` for what cannot be opened, `UnknownRule` for a
    `select` or `ignore` that means no rule, `WrongValue` for another argument.
    """
    checkpoint = opened(checkpoint)
    several = tuple(map(opened_adapter, adapters))
    if base is None:
        found, why_no_base = named_base(
            several[0] if several and isinstance(checkpoint, ModelDir) else checkpoint, near
        )
    else:
        found, why_no_base = opened_model(base, near=near, download=False), ""
    decided(f"{checkpoint.root} is {checkpoint.kind.with_article}")
    if found is None:
        decided(why_no_base)
    elif base is not None:
        decided(f"base: {found.root}, as given")
    decided(_READS[deep])
    task = None if task is None else Task(task).expected
    judge = Judge(
        rules=chosen(select, ignore),
        base=found,
        num_labels=num_labels,
        task=task,
        deep=deep,
        servers=frozenset(map(Server, servers)),
        progress=progress,
        watch=watch,
        why_no_base=why_no_base,
    )
    if not isinstance(checkpoint, RunDir) and not (checkpoints and checkpoint.folder.checkpoints):
        return _judged(checkpoint, judge, several)
    inner = [_checkpoint_of_run(checkpoint.root / name, judge, several) for name in checkpoint.folder.checkpoints]
    rows = [item for item, _ in inner]
    if isinstance(checkpoint, RunDir):
        whole = tuple(found for _, found in inner if found is not None)
        own = judge.folder(RunSubject(checkpoint=checkpoint, inner=whole))
    else:
        own = _judged(checkpoint, judge, several)
        rows.append(judged(checkpoint.root, FINISHED, own, checkpoint))
    table = Report(runs=(run_table(checkpoint.root, rows),))
    return joined([own, *(item.report for item, _ in inner), table])


def judge_checkpoint(path: Path, criteria: Criteria, base: ModelDir | None) -> tuple[Judged, Checkpoint | None]:
    """Return what the checkpoint `path` of a run is worth with this `base`, and it, if it can be opened.

    Raises `UnknownRule` for `criteria` that mean no rule.
    """
    rules = chosen(criteria.select, criteria.ignore)
    return _checkpoint_of_run(path, Judge(rules=rules, base=base, deep=criteria.deep, servers=criteria.servers))


def unresumable_reason(path: Path) -> str | None:
    """Return why no training can go on from the checkpoint `path`, None if one can; every value of it is read."""
    try:
        base = named_base(open_checkpoint(path))[0]
    except LoraToolError:  # which is said below
        base = None
    return judge_checkpoint(path, Criteria(deep=True), base)[0].unresumable


def _checkpoint_of_run(
    path: Path, judge: Judge, adapters: tuple[AdapterDir, ...] = ()
) -> tuple[Judged, Checkpoint | None]:
    if not inside(path.parent, path):
        report = unopened(str(path), "is a link to a place outside the run's folder", judge.rules, code="LT112")
        return judged(path, path.name, report, None), None
    try:
        found = open_checkpoint(path)
        if isinstance(found, RunDir):  # a link to the run itself would never end
            raise NotACheckpoint(f"{path} is a run folder with checkpoints in it, not a checkpoint")
        report = _judged(found, judge, adapters)
    except (LoraToolError, PermissionError) as error:
        # a folder without weights, or a file that went away while it was read: the others are judged all the same
        report = unopened(str(path), f"cannot be opened: {error}", judge.rules)
        return judged(path, path.name, report, None, refused=isinstance(error, UnsupportedCheckpoint)), None
    return judged(path, path.name, report, found, deep=judge.deep is True), found


def _judged(checkpoint: Checkpoint, judge: Judge, adapters: tuple[AdapterDir, ...]) -> Report:
    match checkpoint:
        case AdapterDir():
            return joined([judge.adapter(checkpoint), judge.together((checkpoint, *adapters))])
        case ModelDir():
            return joined([judge.folder(_model(checkpoint, judge, adapters)), *judge.rank_files_beside(checkpoint)])
        case ShardedDir():
            return judge.folder(sharded_subject(checkpoint, watch=judge.watch))
        case RunDir():
            raise AssertionError("the checkpoints of a run are judged one by one")
        case other:
            return assert_never(other)


def _model(checkpoint: ModelDir, judge: Judge, adapters: tuple[AdapterDir, ...]) -> ModelSubject:
    if judge.base is None or not adapters:
        whole = judge.deep is True
        return ModelSubject(
            checkpoint=checkpoint, num_labels=judge.labels, task=judge.task, base=judge.base, whole=whole
        )
    # the planner, only for merged models: importing it takes a fifth of the time of a check
    from lora_tool.plan.merge.provenance import Provenance
    from lora_tool.validation.merged import merged_subject

    provenance = Provenance(merged=checkpoint, base=judge.base, adapters=adapters)
    return merged_subject(provenance, num_labels=judge.labels, task=judge.task, read=judge.deep is not False)
