"""Asking every rule about a checkpoint, and about each checkpoint inside a run folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    Folder,
    ModelDir,
    NamedAdapters,
    RunDir,
    ShardedDir,
    open_checkpoint,
    saves_in,
    trained_among,
)
from lora_tool.checkpoints.named_adapters import NAMED_ADAPTERS
from lora_tool.checkpoints.sources import Reference, opened, opened_adapter, opened_model
from lora_tool.core.choices import assert_never, flag, positive
from lora_tool.core.errors import LoraToolError, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.core.hub_names import ANYWHERE
from lora_tool.core.options import called_with, option
from lora_tool.core.progress import Progress, Watch, decided
from lora_tool.core.report import Report
from lora_tool.core.report.model import joined
from lora_tool.formats.files import inside
from lora_tool.models.mapping.class_tensors import class_tensors
from lora_tool.plans.base.task import Task
from lora_tool.rules.bases import named_base
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import chosen, unopened
from lora_tool.rules.engine.subjects import ModelSubject, RunSubject, Subject
from lora_tool.rules.judging import Judge
from lora_tool.rules.options import SelectOptions
from lora_tool.rules.serving.named import SERVER_NAMES, server_named
from lora_tool.rules.training.saves import FINISHED, Judged, judged, run_table
from lora_tool.rules.training.sharded_subject import sharded_subject


class Criteria(Struct, frozen=True, kw_only=True):
    """How a folder is checked: which rules run, what they read, and which servers will serve it. See `validate`."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    deep: bool | None = None
    servers: frozenset[str] = frozenset()


_READS = {
    True: "weights: all are read",
    False: "weights: none are read, headers only",
    None: "weights: those of adapters are read; of models and rank files only the headers",
}


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(SelectOptions):
    """How a checkpoint is judged, and with what it is compared."""

    base: Reference | None = option(
        None,
        f"Base model to compare with: {ANYWHERE}, never downloaded.  [default: the base named in adapter_config.json, "
        "if it is on this disk]",
        metavar="MODEL",
    )
    adapters: Sequence[Reference] = option(
        (),
        "Adapter that the model PATH was merged with, or that the adapter PATH is to be merged together with.",
        name="adapter",
        metavar="ADAPTER",
        many=True,
    )
    task: Task | str | None = option(
        None,
        '"reward" expects a reward model with one label, "seq-cls" and "causal-lm" such models.',
        parse=Task,
        library_only=True,
    )
    num_labels: int | None = option(None, "Number of labels that the head must have.", parse=positive)
    deep: bool | None = option(
        None, "Read all weights, or none.  [default: only those of adapters]", parse=flag, off="headers-only"
    )
    servers: Iterable[str] = option(
        (),
        "Report what this server refuses or ignores; `vllm@0.32` is one version. May be repeated.",
        parse=server_named,
        metavar=SERVER_NAMES,
        name="for",
        many=True,
    )
    checkpoints: bool = option(
        default=False, text="Judge the checkpoints beside finished weights, too.", parse=flag, library_only=True
    )
    average: bool = option(
        default=False, text="Judge an adapter for a mean with `adapters`, not for a sum.", library_only=True
    )
    near: Path | None = option(
        None,
        "Folder in which a relative path of the base is looked for after the working directory; by default the "
        "adapter's.",
        library_only=True,
    )


def findings_on(
    checkpoint: Reference,
    options: ValidateOptions,
    *,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Report:
    """Return all findings of the rules on `checkpoint`; nothing is changed, and no code is run.

    Every checkpoint may be a path, a Hub id or an opened checkpoint; a base is never downloaded. A base enables the
    rules that compare with it. A model is compared with what base and `adapters` give; an adapter is judged for a merge
    together with them. Rules that could not run are in `skipped`. The checkpoints of a run folder are judged one by one
    and put into one table of `runs`. `progress` is called with the bytes that were read, where they are many; `watch` is
    called for the progress of reading rank files. Raises `CheckpointError` for what cannot be opened, `UnknownRule` for
    a `select` or `ignore` that means no rule, `WrongValue` for another argument.
    """
    checkpoint = opened(checkpoint)
    several = tuple(map(opened_adapter, options.adapters))
    if options.base is None:
        found, why_no_base = named_base(
            several[0] if several and isinstance(checkpoint, ModelDir) else checkpoint, options.near
        )
    else:
        found, why_no_base = opened_model(options.base, near=options.near, download=False), ""
    decided(f"{checkpoint.root} is {checkpoint.kind.with_article}")
    if found is None:
        decided(why_no_base)
    elif options.base is not None:
        decided(f"base: {found.root}, as given")
    decided(_READS[options.deep])
    task = None if options.task is None else Task(options.task).expected
    judge = Judge(
        rules=chosen(options.select, options.ignore),
        base=found,
        num_labels=options.num_labels,
        task=task,
        deep=options.deep,
        servers=frozenset(options.servers),
        progress=progress,
        watch=watch,
        why_no_base=why_no_base,
        ask=class_tensors,
        names=_names,
        average=options.average,
    )
    beside = options.checkpoints and not isinstance(checkpoint, ShardedDir)  # whose steps are judged with it
    saves = saves_in(checkpoint.folder) if isinstance(checkpoint, RunDir) or beside else ()
    if not saves:
        return _judged(checkpoint, judge, several)
    inner = [_checkpoint_of_run(checkpoint.root / name, judge, several) for name in saves]
    rows = [item for item, _ in inner]
    if isinstance(checkpoint, RunDir):
        whole = tuple(found for _, found in inner if found is not None)
        own = judge.folder(RunSubject(checkpoint=checkpoint, inner=whole))
    else:
        own = _judged(checkpoint, judge, several)
        rows.append(judged(checkpoint.root, FINISHED, own, checkpoint))
    table = Report(runs=(run_table(checkpoint.root, rows),))
    return joined([own, *(item.report for item, _ in inner), table])


validate = called_with(ValidateOptions)(findings_on)


def judge_checkpoint(path: Path, criteria: Criteria, base: ModelDir | None) -> tuple[Judged, Checkpoint | None]:
    """Return what the checkpoint `path` of a run is worth with this `base`, and it, if it can be opened.

    Raises `UnknownRule` for `criteria` that mean no rule.
    """
    rules = chosen(criteria.select, criteria.ignore)
    judge = Judge(
        rules=rules,
        base=base,
        deep=criteria.deep,
        servers=criteria.servers,
        ask=class_tensors,
        names=_names,
    )
    return _checkpoint_of_run(path, judge)


def _names(adapter: AdapterDir, base: ModelDir, task: str | None, *, sure: bool) -> tuple[AdapterDir, BaseMatch] | str:
    """See `plans.merge.judged.in_memory`; the planner is imported only for bases with other names on disk."""
    from lora_tool.plans.merge.judged import in_memory

    return in_memory(adapter, base, task, sure=sure)


def judge_save(path: Path) -> Judged:
    """Return what the save `path` is worth with the base that it names; every value of it is read."""
    try:
        base = named_base(open_checkpoint(path))[0]
    except LoraToolError:  # which is said below
        base = None
    return judge_checkpoint(path, Criteria(deep=True), base)[0]


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
            pieces = sharded_subject(checkpoint, watch=judge.watch, whole=judge.deep is True)
            return joined([judge.folder(pieces), *_adapters_in(checkpoint.folder, judge)])
        case NamedAdapters():
            own = Subject(checkpoint=checkpoint, whole=judge.deep is True)
            return joined([judge.folder(own), *_adapters_in(checkpoint.folder, judge)])
        case RunDir():
            raise AssertionError("the checkpoints of a run are judged one by one")
        case other:
            return assert_never(other)


def _adapters_in(save: Folder, judge: Judge) -> Iterator[Report]:
    """Yield the findings about the adapters with names in a save; of one that was not trained only that it cannot be read."""
    found = NAMED_ADAPTERS.open(save) if NAMED_ADAPTERS.recognise(save) else None
    if isinstance(found, NamedAdapters) and found.adapters:
        trained = trained_among(found)
        for adapter in found.adapters:
            yield judge.adapter(adapter) if adapter in trained else judge.unreadable(adapter)


def _model(checkpoint: ModelDir, judge: Judge, adapters: tuple[AdapterDir, ...]) -> ModelSubject:
    if judge.base is None or not adapters:
        whole = judge.deep is True
        return ModelSubject(
            checkpoint=checkpoint,
            num_labels=judge.labels,
            task=judge.task,
            base=judge.base,
            servers=judge.servers,
            whole=whole,
            ask=judge.ask,
        )
    # the planner, only for merged models: importing it takes a fifth of the time of a check
    from lora_tool.plans.merge.provenance import Provenance
    from lora_tool.verification.merged_folder import merged_subject

    provenance = Provenance(merged=checkpoint, base=judge.base, adapters=adapters)
    return merged_subject(provenance, num_labels=judge.labels, task=judge.task, read=judge.deep is not False)
