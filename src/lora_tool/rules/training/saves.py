"""Judging each save of a run, in one place: complete, resumable, loadable, good, and which of a run is the best."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    NamedAdapters,
    ShardedDir,
    adapter_name,
    open_checkpoint,
)
from lora_tool.checkpoints.folders import Folder, is_called_save, read_folder
from lora_tool.checkpoints.kinds import step_of
from lora_tool.core.errors import CheckpointError
from lora_tool.core.report.findings import Finding, Run, RunCheckpoint, Severity
from lora_tool.core.report.model import Report
from lora_tool.core.report.text import by_rule
from lora_tool.formats.files import inside
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.training.complete import (
    broken_state,
    has_optimizer,
    has_optimizer_of_ranks,
    incomplete_reason,
    interrupted_reason,
)

FINISHED = "(finished)"
"""What the weights in the run folder itself are called in the table."""

_NO_METRICS = ("_runtime", "_per_second", "_time", "_tokens", "_samples")
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "ppl")
_OTHER_METHOD = "LT217"
_OF_THE_RUN = "LT7"

_ACCELERATE = re.compile(r"random_states_\d{1,6}\.pkl\Z")


class Judged(Struct, frozen=True, kw_only=True):
    """One save of a run, or its finished weights, and the verdicts of rules and files on it."""

    root: Path
    name: str
    state: TrainerState | None
    report: Report
    step: int | None = None
    """The step that its name says, where no `state` does."""
    adapters: tuple[str, ...] = ()
    """The names of its adapters, where each lies in a folder of its own, with a word on those that were not trained."""
    refused: bool = False
    """Whether lora-tool does not read its layout: nobody knows then what is wrong with it."""
    incomplete: str | None = None
    """Why not all that its program writes is there, whole; the weights may be."""
    unresumable: str | None = None
    """Why no training can go on from it."""
    unloadable: str | None = None
    """Why its weights cannot be used."""
    bad: str | None = None
    """Why it is not good: an error, or a save that ended before its end."""
    only_values: bool = False
    """Whether it was saved to its end, and the values of its weights alone are wrong."""


def judged(
    root: Path, name: str, report: Report, opened: Checkpoint | None, *, refused: bool = False, deep: bool = False
) -> Judged:
    """Return the verdicts on a save by its `report` and its files; `opened` is None where it cannot be opened.

    `deep` reads every byte of the optimizer's and the other states.
    """
    folder = _folder(root) if opened is None else opened.folder
    incomplete = None if folder is None else incomplete_reason(folder, deep=deep)
    interrupted = None if folder is None else interrupted_reason(folder)
    closed = "cannot be opened" if opened is None else None  # also where the rule that reports it is ignored
    error = _first_error(report.findings) or closed
    state = None if opened is None else opened.folder.trainer
    of_weights = [found for found in report.at_least(Severity.ERROR) if not _is_of_the_run(found)]
    return Judged(
        root=root,
        name=name,
        state=state,
        report=report,
        step=step_of(name)[0] if is_called_save(name) else None,
        adapters=tuple(map(adapter_name, opened.adapters)) if isinstance(opened, NamedAdapters) else (),
        refused=refused,
        incomplete=incomplete,
        unresumable=error or incomplete or (None if opened is None else _unresumable_reason(opened, deep=deep)),
        unloadable=_first_error(of_weights) or closed,
        bad=error or interrupted,
        only_values=state is not None and bool(of_weights) and all(RULES[found.code].deep for found in of_weights),
    )


def _is_of_the_run(finding: Finding) -> bool:
    """Return whether a finding is about the run and its log: its weights load all the same."""
    return finding.code.startswith(_OF_THE_RUN) or Path(finding.path).name == TRAINER_STATE


def _first_error(findings: Iterable[Finding]) -> str | None:
    return next((str(found) for found in findings if found.severity is Severity.ERROR), None)


def _folder(root: Path) -> Folder | None:
    """Return the listing of a save that cannot be opened; None where it cannot be listed, or lies outside its run."""
    try:
        return read_folder(root) if inside(root.parent, root) else None
    except CheckpointError:
        return None


def _unresumable_reason(opened: Checkpoint, *, deep: bool) -> str | None:
    """Return why no training goes on from a checkpoint without errors in which nothing is cut off; None if one can."""
    folder = opened.folder
    if isinstance(opened, ShardedDir):
        own = folder.trainer is None or opened.kind.resumed_by_trainer
        return None if own else f"is {opened.kind.with_article}, from which transformers' Trainer cannot resume"
    if folder.trainer is None:
        has_own = has_optimizer_of_ranks if folder.is_numbered else has_optimizer
        own = any(map(_ACCELERATE.match, folder.files)) or has_own(folder)
        return None if own else f"has no {TRAINER_STATE}, so no Trainer can resume from it"
    if not has_optimizer(folder):
        return "has no optimizer state (save_only_model), so resuming would start with a new optimizer"
    return None if is_called_save(folder.name) else broken_state(folder, deep=deep)


def run_table(root: Path, saves: Sequence[Judged], *, log: TrainerState | None = None) -> Run:
    """Return the table of the saves, and which of the complete ones is the best.

    `log` is the state of the furthest of them with all of its log, by default that among `saves`.

    They are compared by the metric whose value is the Trainer's `best_metric`, else by the evaluation loss or
    another evaluated metric of their step; where nothing was evaluated, the latest is taken.
    """
    states = (item.state for item in saves if item.state)
    log = log or max(states, key=lambda state: state.global_step, default=None)
    metric, lower = _metric(log) if log else (None, True)
    rows = [_row(item, metric) for item in saves]
    ranked = _ranked(rows, lower=lower, named=log.best_step if log else None)
    ranks = {row.path: at for at, row in enumerate(ranked, 1)}
    placed = tuple(replace(row, rank=ranks.get(row.path)) for row in rows)
    best = next((row for row in (*ranked, *reversed(rows)) if row.complete), None)
    why = None if best is None else _why_best(best, metric, lower=lower)
    return Run(
        path=str(root), checkpoints=placed, metric=metric, best=None if best is None else best.path, why_best=why
    )


def _metric(state: TrainerState) -> tuple[str | None, bool]:
    """Return the metric that checkpoints are compared by, and whether less of it is better."""
    names = sorted({name for entry in state.log for name in entry if _is_metric(name)})
    called_best = [
        name for name in names if state.best_metric is not None and state.best_metric in _values(state, name)
    ]
    losses = [name for name in names if name.endswith("loss")]
    name = next(iter([*called_best, *(["eval_loss"] if "eval_loss" in names else losses), *names]), None)
    if name is None:
        return None, True
    values = [value for value in _values(state, name) if math.isfinite(value)]
    if (
        name in called_best
        and values
        and min(values) != max(values)
        and state.best_metric in (min(values), max(values))
    ):
        return name, state.best_metric == min(values)
    return name, any(word in name for word in _LOWER_IS_BETTER)


def _is_metric(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(_NO_METRICS)


def _values(state: TrainerState, name: str) -> list[float]:
    return [entry[name] for entry in state.log if name in entry]


def _row(item: Judged, metric: str | None) -> RunCheckpoint:
    state, report = item.state, item.report
    notable = report.at_least(Severity.WARNING)
    return RunCheckpoint(
        path=str(item.root),
        name=item.name,
        step=state.global_step if state else item.step,
        epoch=state.epoch if state else None,
        loss=state.last_loss if state else None,
        metric=_metric_of(state, metric) if state and metric else None,
        nbytes=sum(_sizes(item.root, whole=item.name != FINISHED)),
        errors=report.count(Severity.ERROR),
        warnings=report.count(Severity.WARNING),
        incomplete=item.incomplete,
        unresumable=item.unresumable,
        unloadable=item.unloadable,
        bad=item.bad,
        only_values=item.only_values,
        judged=not item.refused and {finding.code for finding in report.at_least(Severity.ERROR)} != {_OTHER_METHOD},
        codes=tuple(dict.fromkeys(group[0].code for group in by_rule(notable))),
    )


def _metric_of(state: TrainerState, name: str) -> float | None:
    at_step = [entry[name] for entry in state.log if name in entry and entry.get("step") == state.global_step]
    return at_step[-1] if at_step else None


def _sizes(root: Path, *, whole: bool) -> Iterator[int]:
    """Yield the bytes of each file in the folder, and where it is `whole` in the folders in it; links are not followed."""
    for folder, folders, files in os.walk(root):
        if not whole:
            folders.clear()
        for name in files:
            try:
                yield os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - half the time of Path
            except OSError:  # it went away
                continue


def _ranked(rows: Sequence[RunCheckpoint], *, lower: bool, named: int | None) -> list[RunCheckpoint]:
    """Return the good saves that have the metric, best first; without a metric, the latest, first the complete ones.

    Of two that are equal, the one of the step that the Trainer `named` as its best comes first, else the later one.
    """
    good = [row for row in reversed(rows) if row.good]
    measured = [(row.metric, row) for row in good if row.metric is not None and math.isfinite(row.metric)]
    measured.sort(key=lambda pair: (pair[0] if lower else -pair[0], pair[1].step != named))
    return [row for _, row in measured] or sorted(good, key=lambda row: not row.complete)[:1]


def _why_best(best: RunCheckpoint, metric: str | None, *, lower: bool) -> str:
    if metric is not None and best.metric is not None and math.isfinite(best.metric):
        return f"{'lowest' if lower else 'highest'} {metric}, {best.metric:.4g}"
    none = "no checkpoint" if metric is None else "no complete checkpoint"
    return "the finished weights" if best.name == FINISHED else f"the latest, because {none} was evaluated"


def better_checkpoint(finished: Checkpoint, run: Run) -> Path | None:
    """Return the best checkpoint of a run where its `finished` weights are others; None without a metric that says so."""
    if run.metric is None or run.best in (None, run.path):
        return None
    best = Path(str(run.best))
    # the Trainer's `load_best_model_at_end` finishes with the best
    return None if _weights_of(finished) == _weights_of(open_checkpoint(best)) else best


def _weights_of(checkpoint: Checkpoint) -> str | None:
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for runs with finished weights only

    return fingerprint(checkpoint.weights) if isinstance(checkpoint, AdapterDir | ModelDir) else None
