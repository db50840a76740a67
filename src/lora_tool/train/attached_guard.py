"""The guard of somebody else's script: it joins each Trainer of the process, and tells the parent what it has seen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel

from lora_tool.errors import TrainingStopped
from lora_tool.report import Finding
from lora_tool.train import data_checks, live_checks
from lora_tool.train.guard import Guard
from lora_tool.train.job import FOLDER_VARIABLE, TrainingOutcome, TrainingStatus, read_job, write_outcome
from lora_tool.train.logbook import Logbook

_GUARDS: list[AttachedGuard] = []
"""One for each Trainer of this process that is not ours."""


class AttachedGuard(Guard):
    """A guard that transformers makes itself, one for each Trainer. It writes nothing into the script's folders."""

    def __init__(self) -> None:
        super().__init__(Logbook(read_job(Path(os.environ[FOLDER_VARIABLE])).guard))
        _GUARDS.append(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        super().on_train_begin(args, state, control, model=model, **rest)
        self.book.prints = state.is_world_process_zero
        if self.watches and model is not None:
            args.logging_nan_inf_filter = False  # it shows a NaN loss as 0.0
            self.judge(self._checks(args, extract_model_from_parallel(model), rest.get("train_dataloader")))

    def _checks(self, args: Any, model: Any, loader: Any) -> Iterator[Finding]:
        yield from live_checks.model_findings(model, getattr(loader, "collate_fn", None), args, sharded=self._sharded)
        method, data = self.tracker.method, getattr(loader, "dataset", None)
        if method is not None and hasattr(data, "select") and hasattr(data, "column_names"):
            yield from data_checks.row_findings(method, data)

    def judge(self, findings: Iterable[Finding]) -> None:
        """Leave the training at an error, as nothing else keeps a script from going on to save; it ends with this error."""
        try:
            super().judge(findings)
        except TrainingStopped:
            write_what_was_seen()  # the launcher may end this process before it ends itself
            raise


def write_what_was_seen() -> None:
    """Write the outcome of all trainings of this process, for the parent."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    if not _GUARDS or not folder.is_dir():
        return
    books = [guard.book for guard in _GUARDS]
    stop = next((book.stopped for book in books if book.stopped), None)
    method = _GUARDS[-1].tracker.method
    outcome = TrainingOutcome(
        status=TrainingStatus.STOPPED if stop else TrainingStatus.DONE,
        findings=tuple(found for book in books for found in book.findings),
        facts={
            "outputs": sorted({str(Path(guard.args.output_dir).resolve()) for guard in _GUARDS if guard.args}),
            "method": method.name if method else None,
        },
        error=str(stop) if stop else None,
        hint=stop.hint if stop else None,
    )
    write_outcome(folder, int(os.environ.get("RANK", "0")), outcome)
