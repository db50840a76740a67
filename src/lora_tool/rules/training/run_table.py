"""A run folder as a table: each checkpoint's step, metric, size and verdict, and the best one that is whole."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from lora_tool.formats.trainer_state import TrainerState
from lora_tool.report.findings import Severity
from lora_tool.report.groups import by_rule
from lora_tool.report.model import Report
from lora_tool.report.runs import Run, RunCheckpoint

FINISHED = "(finished)"
"""What the weights in the run folder itself are called in the table."""

_NO_METRICS = ("_runtime", "_per_second", "_time", "_tokens", "_samples")
_LOWER_IS_BETTER = ("loss", "perplexity", "error", "wer", "cer", "ppl")
_OTHER_METHOD = "LT217"


class Judged(Struct, frozen=True, kw_only=True):
    """One checkpoint of a run, and what the rules say about it."""

    root: Path
    name: str
    state: TrainerState | None
    report: Report
    step: int | None = None
    """The step that its name says, where no `state` does."""
    refused: bool = False
    """Whether it is of a layout that is not read: nobody knows then what is wrong with it."""


def run_table(root: Path, judged: Sequence[Judged], *, log: TrainerState | None = None) -> Run:
    """Return the table of the checkpoints, and the best of those without errors.

    `log` is the state of the furthest of them with all of its log, by default that among `judged`.

    They are compared by what the Trainer called the best metric, else by the evaluation loss or another evaluated
    metric of their step; where nothing was evaluated, the latest is taken.
    """
    states = (item.state for item in judged if item.state)
    log = log or max(states, key=lambda state: state.global_step, default=None)
    metric, lower = _metric(log) if log else (None, True)
    rows = tuple(_row(item, metric) for item in judged)
    best, why = _best(rows, metric, lower=lower)
    return Run(path=str(root), checkpoints=rows, metric=metric, best=best.path if best else None, why_best=why)


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
        nbytes=_size_of(item.root, whole=item.name != FINISHED),
        errors=report.count(Severity.ERROR),
        warnings=report.count(Severity.WARNING),
        judged=not item.refused and {finding.code for finding in report.at_least(Severity.ERROR)} != {_OTHER_METHOD},
        codes=tuple(dict.fromkeys(group[0].code for group in by_rule(notable))),
    )


def _metric_of(state: TrainerState, name: str) -> float | None:
    at_step = [entry[name] for entry in state.log if name in entry and entry.get("step") == state.global_step]
    return at_step[-1] if at_step else None


def _size_of(root: Path, *, whole: bool) -> int:
    """Return the bytes of the files in the folder; links are not followed."""
    return sum(_sizes(root, whole=whole))


def _sizes(root: Path, *, whole: bool) -> Iterator[int]:
    for folder, folders, files in os.walk(root):
        if not whole:
            folders.clear()
        for name in files:
            try:
                yield os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - half the time of Path
            except OSError:  # it went away
                continue


def _best(rows: Iterable[RunCheckpoint], metric: str | None, *, lower: bool) -> tuple[RunCheckpoint | None, str | None]:
    whole = [row for row in rows if row.whole]
    measured = [(row.metric, row) for row in whole if row.metric is not None and math.isfinite(row.metric)]
    if measured:
        # the later one of two that are equal
        value, row = min(reversed(measured), key=lambda pair: pair[0] if lower else -pair[0])
        return row, f"{'lowest' if lower else 'highest'} {metric}, {value:.4g}"
    if not whole:
        return None, None
    finished = whole[-1].name == FINISHED
    return whole[-1], "the finished weights" if finished else "the latest, because no checkpoint was evaluated"
