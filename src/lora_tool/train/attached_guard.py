"""The guard inside somebody else's training: it checks the model when training begins, and tells the parent at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel

from lora_tool.display import printable
from lora_tool.errors import TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.train import data_checks, live_checks
from lora_tool.train.guard import Guard
from lora_tool.train.job import FOLDER_VARIABLE, TrainingOutcome, TrainingStatus, read_job, write_outcome
from lora_tool.train.methods import METHODS, Method

_GUARDS: list[AttachedGuard] = []


class AttachedGuard(Guard):
    """A guard that transformers makes itself, one for each Trainer. It writes nothing into the script's folders."""

    writes_metrics = False

    def __init__(self) -> None:
        job = read_job(Path(os.environ[FOLDER_VARIABLE]))
        super().__init__(job.guard)
        self.stopped: TrainingStopped | None = None
        self.seen: list[Finding] = []
        _GUARDS.append(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.method = self.tracker.method = _method_of(args)
        super().on_train_begin(args, state, control, model=model, **rest)
        if self.settings.mode == "off" or model is None:
            return
        args.logging_nan_inf_filter = False  # it shows a NaN loss as 0.0
        for found in self._checks(args, extract_model_from_parallel(model), rest.get("train_dataloader")):
            if found.code not in self.settings.ignore:
                self._print(found, main=state.is_world_process_zero)
        errors = [found for found in self.seen if found.severity is Severity.ERROR]
        if errors and self.settings.mode == "stop":
            self._raise(TrainingStopped(f"{errors[0].code}: {errors[0].message}", hint=errors[0].hint))

    def _checks(self, args: Any, model: Any, loader: Any) -> Iterator[Finding]:
        yield from live_checks.model_findings(model, getattr(loader, "collate_fn", None), args, sharded=self._sharded)
        data = getattr(loader, "dataset", None)
        if self.method is not None and hasattr(data, "select") and hasattr(data, "column_names"):
            yield from data_checks.row_findings(self.method, data)

    def _print(self, found: Finding, *, main: bool) -> None:
        self.seen.append(found)
        if main:
            hint = f"\n  hint: {printable(found.hint)}" if found.hint else ""
            sys.stderr.write(f"{found.severity}: {found.code}: {printable(found.message)}{hint}\n")

    def _report(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._report(*args, **kwargs)
        except TrainingStopped as stop:
            self._raise(stop)

    def _raise(self, stop: TrainingStopped) -> None:
        """Leave the training, as nothing else keeps a script from going on to save; the script ends with this error."""
        self.stopped = stop
        write_what_was_seen(Path(os.environ[FOLDER_VARIABLE]))
        raise stop


def _method_of(args: Any) -> Method | None:
    """Return the method whose config class the arguments are; None for a plain Trainer."""
    names = {base.__name__ for base in type(args).__mro__}
    return next((method for method in METHODS.values() if method.config in names), None)


def write_what_was_seen(folder: Path) -> None:
    """Write the outcome of all trainings of this process, for the parent."""
    if not _GUARDS or not folder.is_dir():
        return
    stop = next((guard.stopped for guard in _GUARDS if guard.stopped), None)
    last = _GUARDS[-1]
    outcome = TrainingOutcome(
        status=TrainingStatus.STOPPED if stop else TrainingStatus.DONE,
        findings=tuple(found for guard in _GUARDS for found in (*guard.seen, *guard.findings)),
        facts={
            "outputs": sorted({str(guard.output_dir.resolve()) for guard in _GUARDS if guard.output_dir}),
            "method": last.method.name if last.method else None,
        },
        error=str(stop) if stop else None,
        hint=stop.hint if stop else None,
    )
    write_outcome(folder, int(os.environ.get("RANK", "0")), outcome)
