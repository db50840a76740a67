"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoint import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    RunDir,
    ShardedDir,
    open_checkpoint,
)
from lora_tool.errors import LoraToolError, NotACheckpoint
from lora_tool.formats.files import inside
from lora_tool.plan.base.task import Task
from lora_tool.progress import Watch
from lora_tool.report import Report
from lora_tool.report.model import joined
from lora_tool.rules.engine.registry import Rule, chosen
from lora_tool.rules.engine.subjects import ModelSubject, RunSubject, Server, Subject
from lora_tool.rules.judging import NO_BASE, judge, judge_adapter, judge_together, rank_files_beside, unopened
from lora_tool.rules.training.run_table import FINISHED, Judged, run_table
from lora_tool.rules.training.sharded_subject import sharded_subject
from lora_tool.sources import Reference, opened, opened_adapter, opened_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """By what a folder is judged: which rules, how deep they read, and what is to serve it. See `validate`."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    deep: bool | None = None
    servers: frozenset[Server] = frozenset()


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
    why_no_base: str = NO_BASE,
) -> Report:
    """Return everything that the rules find in `checkpoint`, from headers; nothing is changed, no code is run.

    Every checkpoint may be a path, a Hub id or an opened one; a base is not downloaded.
    `base` switches on the rules that compare with it; `why_no_base` is what the report says without one. `adapters` are
    those that a model was merged with: with `base` it is compared with what they give; of an adapter they are those that
    it is to be merged together with. `task`
    "reward" expects a reward model with one label, "seq-cls" and "causal-lm" such models; `num_labels` are the rows that
    the head must have. `select` are the only rules that judge, `ignore` those that do not. `deep` True reads all weights, False none, None those of adapters. `servers` switches on the
    rules of what serves the adapter unmerged. Rules that could not run are in `skipped`. The checkpoints of a run
    folder are judged one by one, with `checkpoints` also those beside finished weights, and put into one table of
    `runs`. `progress` is called with the bytes that were read, where they are many;
    `watch` is called for the progress of reading rank files. Raises `CheckpointError` for what cannot be opened,
    `UnknownRule` for a `select` or `ignore` that means no rule, `WrongValue` for another argument.
    """
    checkpoint = opened(checkpoint)
    task = None if task is None else Task(task).expected
    asked = _Asked(
        rules=chosen(select, ignore),
        base=None if base is None else opened_model(base, download=False),
        adapters=tuple(map(opened_adapter, adapters)),
        num_labels=1 if task == "reward" and num_labels is None else num_labels,
        task=task,
        deep=deep,
        servers=frozenset(map(Server, servers)),
        progress=progress,
        watch=watch,
        why_no_base=why_no_base,
    )
    if not isinstance(checkpoint, RunDir) and not (checkpoints and checkpoint.folder.checkpoints):
        return _judged(checkpoint, asked)
    inner = [_checkpoint_of_run(checkpoint.root / name, asked) for name in checkpoint.folder.checkpoints]
    if isinstance(checkpoint, RunDir):
        whole = tuple(found for _, found in inner if found is not None)
        own = _judge(RunSubject(checkpoint=checkpoint, inner=whole), asked)
        rows = [item for item, _ in inner]
    else:
        own = _judged(checkpoint, asked)
        finished = Judged(root=checkpoint.root, name=FINISHED, state=checkpoint.folder.trainer, report=own)
        rows = [*(item for item, _ in inner), finished]
    table = Report(runs=(run_table(checkpoint.root, rows),))
    return joined([own, *(item.report for item, _ in inner), table])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was asked of one check."""

    rules: tuple[Rule, ...]
    base: ModelDir | None = None
    adapters: tuple[AdapterDir, ...] = ()
    num_labels: int | None = None
    task: str | None = None
    deep: bool | None = None
    servers: frozenset[Server] = frozenset()
    progress: Callable[[int], None] | None = None
    watch: Watch | None = None
    why_no_base: str = NO_BASE


def _judged(checkpoint: Checkpoint, asked: _Asked) -> Report:
    if isinstance(checkpoint, AdapterDir):
        own = judge_adapter(
            checkpoint,
            asked.rules,
            base=asked.base,
            num_labels=asked.num_labels,
            task=asked.task,
            servers=asked.servers,
            deep=asked.deep,
            progress=asked.progress,
            watch=asked.watch,
            why_no_base=asked.why_no_base,
        )
        return joined([own, judge_together((checkpoint, *asked.adapters), asked.rules)])
    return joined(
        subject if isinstance(subject, Report) else _judge(subject, asked) for subject in _subjects(checkpoint, asked)
    )


def judge_checkpoint(path: Path, criteria: Criteria, base: ModelDir | None) -> tuple[Judged, Checkpoint | None]:
    """Return what `validate` says about the checkpoint `path` of a run with this `base`, and it, if it can be opened.

    Raises `UnknownRule` for `criteria` that mean no rule.
    """
    asked = _Asked(
        rules=chosen(criteria.select, criteria.ignore), base=base, deep=criteria.deep, servers=criteria.servers
    )
    return _checkpoint_of_run(path, asked)


def _checkpoint_of_run(path: Path, asked: _Asked) -> tuple[Judged, Checkpoint | None]:
    if not inside(path.parent, path):
        report = unopened(str(path), "is a link out of the run's folder", asked.rules, code="LT112")
        return Judged(root=path, name=path.name, state=None, report=report), None
    try:
        opened = open_checkpoint(path)
        if isinstance(opened, RunDir):  # a link to the run itself would never end
            raise NotACheckpoint(f"{path} is a run with checkpoints in it, and no checkpoint")
        report = _judged(opened, asked)
    except (LoraToolError, PermissionError) as error:
        # a folder without weights, or a file that went away while it was read: the others are judged all the same
        report = unopened(str(path), f"cannot be opened: {error}", asked.rules)
        return Judged(root=path, name=path.name, state=None, report=report), None
    return Judged(root=path, name=path.name, state=opened.folder.trainer, report=report), opened


def _subjects(checkpoint: Checkpoint, asked: _Asked) -> Iterator[Subject | Report]:
    """Yield what is to be judged: the folder, and the rank files in it; what cannot be judged has its report."""
    if isinstance(checkpoint, ModelDir) and asked.base is not None and asked.adapters:
        # the planner, only for merged models: importing it takes a fifth of the time of a check
        from lora_tool.plan.merge.provenance import Provenance  # noqa: PLC0415
        from lora_tool.validation.merged import merged_subject  # noqa: PLC0415

        provenance = Provenance(merged=checkpoint, base=asked.base, adapters=asked.adapters)
        yield merged_subject(provenance, num_labels=asked.num_labels, task=asked.task, read=asked.deep is not False)
    elif isinstance(checkpoint, ModelDir):
        yield ModelSubject(
            checkpoint=checkpoint,
            num_labels=asked.num_labels,
            task=asked.task,
            base=asked.base,
            whole=asked.deep is True,
        )
    elif isinstance(checkpoint, ShardedDir):
        yield sharded_subject(checkpoint, watch=asked.watch)
    else:
        yield Subject(checkpoint=checkpoint)
    if isinstance(checkpoint, ModelDir):
        yield from rank_files_beside(checkpoint, asked.rules, asked.watch)


def _judge(subject: Subject, asked: _Asked) -> Report:
    return judge(
        subject,
        asked.rules,
        deep=asked.deep,
        servers=asked.servers,
        progress=asked.progress,
        why_no_base=asked.why_no_base,
    )
