"""Judging each save of a run, in one place: complete, resumable, loadable, good, and which of a run is the best.

The HF Trainer writes weights, then the optimizer, scheduler and random states, and trainer_state.json last
(`Trainer._save_checkpoint`, transformers 5.23). A run that is killed in between leaves weights that load and nothing to
resume from. FSDP's optimizer states are a distributed checkpoint, whose `.metadata` is written last and names its files.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import Checkpoint, ShardedDir, open_sharded
from lora_tool.checkpoints.folders import Folder, is_numbered, listed, read_folder
from lora_tool.checkpoints.kinds import matches, read_pointer, step_of
from lora_tool.checkpoints.registry import holds_rank_files
from lora_tool.core.errors import CheckpointError, CorruptFile, UnsupportedCheckpoint
from lora_tool.core.report.findings import Finding, Run, RunCheckpoint, Severity
from lora_tool.core.report.model import Report
from lora_tool.core.report.text import by_rule
from lora_tool.formats.files import inside, open_regular, read_all, read_at
from lora_tool.formats.pickles import MAX_PICKLE_BYTES
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.rules.engine.registry import RULES

FINISHED = "(finished)"
"""What the weights in the run folder itself are called in the table."""

_NO_METRICS = ("_runtime", "_per_second", "_time", "_tokens", "_samples")
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "ppl")
_OTHER_METHOD = "LT217"
_OF_THE_RUN = "LT7"

_OPTIMIZERS = frozenset({"optimizer.pt", "optimizer.bin"})
_SCHEDULER = "scheduler.pt"
_RANDOM_STATES = re.compile(r"rng_state(?:_(?P<rank>\d{1,6}))?\.pth\Z")
_TORCH_STATES = re.compile(r"(?:optimizer\.(?:pt|bin)|(?:scheduler|scaler)\.pt|rng_state(?:_\d{1,6})?\.pth)\Z")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d{1,3}\Z")
_TRAINERS_OWN = re.compile(r"(?:training_args\.bin|optimizer\.pt|scheduler\.pt|rng_state(?:_\d{1,6})?\.pth)\Z")
"""Files by which a save of the HF Trainer is known before it has written its state."""
_ACCELERATE = re.compile(r"random_states_\d{1,6}\.pkl\Z")
_DEEPSPEED_POINTER = "latest"
_DEEPSPEED_TAG = re.compile(r"global_step\d{1,15}\Z")
_PIECE = re.compile(rb"__\d{1,6}_\d{1,6}\.distcp")
_END_OF_ZIP = b"PK\x05\x06", 22
"""What a zip file without a comment ends with: the record that begins so, of as many bytes."""
_NEAREST = 10
"""As many saves of a run are compared with one that lacks a file: it may have thousands."""
_CHUNK_BYTES = 1 << 20


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
    interrupted = None if folder is None else _interrupted_reason(folder)
    closed = "cannot be opened" if opened is None else None  # also where the rule that reports it is ignored
    error = _first_error(report.findings) or closed
    state = None if opened is None else opened.folder.trainer
    of_weights = [found for found in report.at_least(Severity.ERROR) if not _is_of_the_run(found)]
    return Judged(
        root=root,
        name=name,
        state=state,
        report=report,
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


def incomplete_reason(folder: Folder, *, deep: bool = False) -> str | None:
    """Return why not all that a program writes into a save is there, whole; None for a complete one and other folders.

    `deep` reads every byte of the optimizer's and the other states.
    """
    interrupted = _interrupted_reason(folder)
    if interrupted is not None or not folder.is_numbered:
        return interrupted
    return _broken_state(folder, deep=deep) or _lost_state(folder)


def _interrupted_reason(folder: Folder) -> str | None:
    """Return why a save ended before its end, by its name and by what its program writes last; None if it did not."""
    if folder.is_in_progress:
        return "has the name of a save in progress, which its program renames when all is written"
    if not folder.is_numbered or folder.trainer is not None:
        return None
    if TRAINER_STATE in folder.files:
        return f"holds a {TRAINER_STATE} that cannot be read"
    by_trainer = any(map(_TRAINERS_OWN.match, folder.files))
    if by_trainer or any(TRAINER_STATE in other.files for other in _others(folder)):
        return f"has no {TRAINER_STATE}, which the Trainer writes last, so it was not saved completely"
    return None


def _broken_state(folder: Folder, *, deep: bool) -> str | None:
    """Return which of the files that a run resumes from is cut off or missing, where the others say that it was there."""
    for name in filter(_TORCH_STATES.match, folder.files):
        if not _is_whole(folder.root / name, deep=deep):
            return f"holds {name}, which is not a complete torch.save file"
    for name in filter(_OPTIMIZER_FOLDER.match, folder.folders):
        lost = _lost_piece(folder.root / name)
        if lost is not None:
            return f"holds {name}, which {lost}"
    if folder.trainer is not None and _has_own_optimizer(folder) and _SCHEDULER not in folder.files:
        return f"has no {_SCHEDULER}, without which the Trainer loads no optimizer state either"
    return _lost_tag(folder) or _lost_rank(folder)


def _lost_piece(optimizer: Path) -> str | None:
    """Return what FSDP's folder of optimizer states lacks: `.metadata`, or a file that it names, to its end."""
    if ".metadata" not in listed(optimizer):
        return "has no .metadata, which is written last"
    try:
        names = sorted(set(_PIECE.findall(read_all(optimizer / ".metadata", limit=MAX_PICKLE_BYTES))))
    except CorruptFile as error:
        return f"cannot be read: {error}"
    lost = next((name for name in map(bytes.decode, names) if not _ends_as_zip(optimizer / name)), None)
    return None if lost is None else f"lacks {lost}, or its end"


def _ends_as_zip(path: Path) -> bool:
    """Return whether the file ends as the torch.save archives do that pieces consist of."""
    begins, length = _END_OF_ZIP
    try:
        with open_regular(path) as fd:
            return read_at(path, fd, os.fstat(fd).st_size - length, length).startswith(begins)
    except (CorruptFile, OSError):
        return False


def _lost_tag(folder: Folder) -> str | None:
    if _DEEPSPEED_POINTER not in folder.files:
        tag = next(filter(_DEEPSPEED_TAG.match, folder.folders), None)
        if tag is None or folder.trainer is None:
            return None
        return f"has {tag}, but no `{_DEEPSPEED_POINTER}`, which DeepSpeed writes last"
    tag = read_pointer(folder.root / _DEEPSPEED_POINTER)
    if tag is None or tag in folder.folders:
        return None
    return f"has a `{_DEEPSPEED_POINTER}` that {f'names {tag}, which is not there' if tag else 'is empty'}"


def _lost_rank(folder: Folder) -> str | None:
    """Return which rank's random states are missing; a run that goes on with fewer processes has fewer of them.

    One process alone writes no number, and a machine that shares no disk holds the states of its own ranks.
    """
    held = _ranks(folder)
    lost = set(range(min(held), max(held))) - held if held else set()
    if held == {0} and any(1 in _ranks(other) for other in _others(folder)):
        lost = {1}
    return f"has no rng_state_{min(lost)}.pth" if lost else None


def _ranks(folder: Folder) -> set[int]:
    return {int(match["rank"]) for name in folder.files if (match := _RANDOM_STATES.match(name)) and match["rank"]}


def _lost_state(folder: Folder) -> str | None:
    """Return what another save of the run can be resumed from and this one lacks, None where it lacks nothing."""
    lacking = {name: is_in for name, is_in in _STATES.items() if not is_in(folder)}
    for other in _others(folder) if lacking else ():
        for name, is_in in lacking.items():
            if is_in(other):
                return f"has no {name}, but {other.root.name} has"
    return None


def _others(folder: Folder) -> Iterator[Folder]:
    """Yield the names in other `checkpoint-N` of the same run, the nearest first."""
    run = folder.root.absolute().parent
    step, _ = step_of(folder.root.name)
    others = (name for name in listed(run) if is_numbered(name) and name != folder.root.name)
    for name in sorted(others, key=lambda other: abs(step_of(other)[0] - step))[:_NEAREST]:
        names = listed(run / name)
        yield Folder(root=run / name, files=names, folders=names)


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


_STATES: Mapping[str, Callable[[Folder], bool]] = {
    "optimizer state": _has_optimizer,
    _SCHEDULER: lambda folder: _SCHEDULER in folder.files,
    "random states": lambda folder: any(map(_RANDOM_STATES.match, folder.files)),
}
"""What a run is resumed from besides its log → whether a save has it."""


def _is_whole(path: Path, *, deep: bool) -> bool:
    """Return whether a torch file has its directory, which is at its end; `deep` compares every checksum, too."""
    import zipfile  # only saves of runs need it

    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with zipfile.ZipFile(path) as file:
            for entry in file.infolist() if deep else ():
                if entry.CRC:  # `torch.serialization.set_crc32_options(False)` writes 0
                    with file.open(entry) as content:
                        while content.read(_CHUNK_BYTES):
                            pass
            return True
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
    return Run(path=str(root), checkpoints=placed, metric=metric, best=best and best.path, why_best=why)


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
