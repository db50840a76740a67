"""Judging each save of a run, in one place: complete, resumable, loadable, good, and which of a run is the best.

The HF Trainer writes weights, then the optimizer, scheduler and random states, and trainer_state.json last
(`Trainer._save_checkpoint`, transformers 5.23). A run that is killed in between leaves weights that load and nothing to
resume from.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import Checkpoint, ShardedDir, open_sharded
from lora_tool.checkpoints.folders import Folder, is_numbered, listed, read_folder
from lora_tool.checkpoints.kinds import matches, read_pointer, step_of
from lora_tool.checkpoints.registry import holds_rank_files
from lora_tool.core.errors import CheckpointError, UnsupportedCheckpoint
from lora_tool.core.report.findings import Finding, Run, RunCheckpoint, Severity
from lora_tool.core.report.model import Report
from lora_tool.core.report.text import by_rule
from lora_tool.formats.files import inside, is_file
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.formats.trainer_state import TrainerState

FINISHED = "(finished)"
"""What the weights in the run folder itself are called in the table."""

_NO_METRICS = ("_runtime", "_per_second", "_time", "_tokens", "_samples")
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "ppl")
_OTHER_METHOD = "LT217"
_OF_THE_RUN = "LT7"

_OPTIMIZERS = frozenset({"optimizer.pt", "optimizer.bin"})
_SCHEDULER = "scheduler.pt"
_TORCH_STATES = re.compile(r"(?:optimizer\.(?:pt|bin)|(?:scheduler|scaler)\.pt|rng_state(?:_\d{1,6})?\.pth)\Z")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d{1,3}\Z")
_TRAINERS_OWN = re.compile(r"(?:training_args\.bin|optimizer\.pt|scheduler\.pt|rng_state(?:_\d{1,6})?\.pth)\Z")
"""Files by which a save of the HF Trainer is known before it has written its state."""
_ACCELERATE = re.compile(r"random_states_\d{1,6}\.pkl\Z")
_DEEPSPEED_POINTER = "latest"


class Judged(Struct, frozen=True, kw_only=True):
    """One save of a run, or its finished weights, and the verdicts of rules and files on it."""

    root: Path
    name: str
    state: TrainerState | None
    report: Report
    step: int | None = None
    """The step that its name says, where no `state` does."""
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


def judged(
    root: Path, name: str, report: Report, opened: Checkpoint | None, *, refused: bool = False, deep: bool = False
) -> Judged:
    """Return the verdicts on a save by its `report` and its files; `opened` is None where it cannot be opened.

    `deep` reads every byte of the optimizer's and the other states.
    """
    folder = _folder(root) if opened is None else opened.folder
    incomplete = None if folder is None else incomplete_reason(folder, deep=deep)
    interrupted = None if folder is None else _interrupted_reason(folder)
    closed = "cannot be opened" if opened is None else None  # also where the rule that reports it is ignored
    error = _first_error(report.findings) or closed
    return Judged(
        root=root,
        name=name,
        state=None if opened is None else opened.folder.trainer,
        report=report,
        refused=refused,
        incomplete=incomplete,
        unresumable=error or incomplete or (None if opened is None else _unresumable_reason(opened, deep=deep)),
        unloadable=_first_error(found for found in report.findings if not found.code.startswith(_OF_THE_RUN)) or closed,
        bad=error or interrupted,
    )


def _first_error(findings: Iterable[Finding]) -> str | None:
    return next((str(found) for found in findings if found.severity is Severity.ERROR), None)


def _folder(root: Path) -> Folder | None:
    """Return the listing of a save that cannot be opened; None where it cannot be listed, or lies outside its run."""
    try:
        return read_folder(root) if inside(root.parent, root) else None
    except CheckpointError:
        return None


def incomplete_reason(folder: Folder, *, deep: bool = False) -> str | None:
    """Return why not all that a program writes into a save is there, whole; None for a complete one and other folders."""
    interrupted = _interrupted_reason(folder)
    if interrupted is not None or not folder.is_numbered:
        return interrupted
    return _broken_state(folder, deep=deep) or _lost_optimizer(folder)


def _interrupted_reason(folder: Folder) -> str | None:
    """Return why a save ended before its end, by its name and by what its program writes last; None if it did not."""
    if folder.is_in_progress:
        return "has the name of a save in progress, which its program renames when all is written"
    if not folder.is_numbered or folder.trainer is not None:
        return None
    if TRAINER_STATE in folder.files:
        return f"{TRAINER_STATE} cannot be read"
    if any(map(_TRAINERS_OWN.match, folder.files)) or _other_save_with(folder, frozenset({TRAINER_STATE})):
        return f"has no {TRAINER_STATE}, which the Trainer writes last, so it was not saved completely"
    return None


def _broken_state(folder: Folder, *, deep: bool) -> str | None:
    """Return which of the files that a run resumes from is cut off or missing, where the others say that it was there."""
    for name in filter(_TORCH_STATES.match, folder.files):
        if not _is_whole(folder.root / name, deep=deep):
            return f"{name} is not a complete torch.save file"
    for name in filter(_OPTIMIZER_FOLDER.match, folder.folders):
        if ".metadata" not in listed(folder.root / name):
            return f"{name} has no .metadata, which is written last"
    tag = read_pointer(folder.root / _DEEPSPEED_POINTER) if _DEEPSPEED_POINTER in folder.files else None
    if tag is not None and tag not in folder.folders:
        return f"`{_DEEPSPEED_POINTER}` {f'names {tag}, which is not there' if tag else 'is empty'}"
    if folder.trainer is not None and _has_own_optimizer(folder) and _SCHEDULER not in folder.files:
        return f"has no {_SCHEDULER}, without which the Trainer loads no optimizer state either"
    return None


def _lost_optimizer(folder: Folder) -> str | None:
    if _has_optimizer(folder):
        return None
    other = _other_save_with(folder, _OPTIMIZERS)
    return None if other is None else f"has no optimizer state, but {other} has"


def _other_save_with(folder: Folder, names: frozenset[str]) -> str | None:
    """Return another `checkpoint-N` of the same run with a file of one of these names."""
    run = folder.root.absolute().parent
    others = (name for name in sorted(listed(run), key=step_of) if is_numbered(name) and name != folder.root.name)
    return next((other for other in others if any(is_file(run / other / name) for name in names)), None)


def _has_optimizer(folder: Folder) -> bool:
    return _has_own_optimizer(folder) or _has_optimizer_of_ranks(folder)


def _has_own_optimizer(folder: Folder) -> bool:
    return not _OPTIMIZERS.isdisjoint(folder.files) or any(map(_OPTIMIZER_FOLDER.match, folder.folders))


def _has_optimizer_of_ranks(folder: Folder) -> bool:
    if not holds_rank_files(folder):
        return False
    try:
        found = open_sharded(folder.root)
    except (CheckpointError, UnsupportedCheckpoint):
        return False
    names = (name for tag in found.rank_files for name in found.folder.names_in(tag))
    return any(matches(name, found.kind.optimizer) for name in names)


def _is_whole(path: Path, *, deep: bool) -> bool:
    """Return whether a torch file has its directory, which is at its end; `deep` compares every checksum, too."""
    import zipfile  # only saves of runs need it

    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with zipfile.ZipFile(path) as file:
            return not deep or file.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


def _unresumable_reason(opened: Checkpoint, *, deep: bool) -> str | None:
    """Return why no training goes on from a checkpoint without errors in which nothing is cut off; None if one can."""
    folder = opened.folder
    if isinstance(opened, ShardedDir):
        own = folder.trainer is None or opened.kind.resumed_by_trainer
        return None if own else f"is {opened.kind.with_article}, from which transformers' Trainer cannot resume"
    if folder.trainer is None:
        own = any(map(_ACCELERATE.match, folder.files)) or _has_optimizer_of_ranks(folder)
        return None if own else f"has no {TRAINER_STATE}, so no Trainer can resume from it"
    if not _has_optimizer(folder):
        return "has no optimizer state (save_only_model), so resuming would start with a new optimizer"
    return None if folder.is_numbered else _broken_state(folder, deep=deep)


def run_table(root: Path, saves: Sequence[Judged], *, log: TrainerState | None = None) -> Run:
    """Return the table of the saves, and which of the good ones is the best.

    `log` is the state of the furthest of them with all of its log, by default that among `saves`.

    They are compared by the metric whose value is the Trainer's `best_metric`, else by the evaluation loss or
    another evaluated metric of their step; where nothing was evaluated, the latest is taken.
    """
    states = (item.state for item in saves if item.state)
    log = log or max(states, key=lambda state: state.global_step, default=None)
    metric, lower = _metric(log) if log else (None, True)
    rows = [_row(item, metric) for item in saves]
    ranked, why = _ranked(rows, metric, lower=lower, named=log.best_step if log else None)
    ranks = {row.path: at for at, row in enumerate(ranked, 1)}
    placed = tuple(replace(row, rank=ranks.get(row.path)) for row in rows)
    return Run(path=str(root), checkpoints=placed, metric=metric, best=ranked[0].path if ranked else None, why_best=why)


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


def _ranked(
    rows: Sequence[RunCheckpoint], metric: str | None, *, lower: bool, named: int | None
) -> tuple[list[RunCheckpoint], str | None]:
    """Return the good saves that have the metric, best first, and why the first is; without a metric, the latest.

    Of two that are equal, the one of the step that the Trainer `named` as its best comes first, else the later one.
    """
    good = [row for row in rows if row.good]
    measured = [(row.metric, row) for row in good if row.metric is not None and math.isfinite(row.metric)]
    if measured:
        measured.reverse()
        measured.sort(key=lambda pair: (pair[0] if lower else -pair[0], pair[1].step != named))
        return [row for _, row in measured], f"{'lowest' if lower else 'highest'} {metric}, {measured[0][0]:.4g}"
    if not good:
        return [], None
    finished = good[-1].name == FINISHED
    return good[-1:], "the finished weights" if finished else "the latest, because no checkpoint was evaluated"
