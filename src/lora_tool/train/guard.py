"""The guard: a callback of the HF Trainer that watches gradients and logs, and raises when a run is doomed.

`Guard` is for a trainer that we build, `AttachedGuard` for one of somebody else's script.

It raises because `should_training_stop` would let the script go on to say "completed" and save what it has. All ranks
see the same gathered figures and the same reduced gradients, so all leave together; sharded gradients, of which each
rank sees a part, are judged by the logged norm alone.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback

from lora_tool.display import printable
from lora_tool.errors import TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.report.groups import by_rule
from lora_tool.train import data_checks, live_checks
from lora_tool.train.config import GuardSettings
from lora_tool.train.diagnosis import SignalTracker
from lora_tool.train.job import FOLDER_VARIABLE, TrainingOutcome, TrainingStatus, json_value, read_job, write_outcome
from lora_tool.train.methods import METHODS
from lora_tool.train.saving import clean_card, free_name, lost_in
from lora_tool.train.traps import trap

METRICS = "metrics.jsonl"
_SCALER_PATIENCE = 20
"""Steps in a row that a GradScaler may skip: it starts at 65536 and halves, so 16 skips can be its way down."""

_SNAPSHOT = 1 << 26
"""Elements of trained parameters whose start is kept to be compared with the end: an adapter's, not a model's."""


class Logbook:
    """What one process sees of a training: findings, notes and facts, printed as they come where it `prints`.

    `known` are codes of findings that the user has seen.
    """

    def __init__(self, settings: GuardSettings, *, known: Sequence[str] = (), prints: bool = True) -> None:
        self.settings = settings
        self.known = known
        self.prints = prints
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}
        self.stopped: TrainingStopped | None = None

    def report(self, findings: Iterable[Finding]) -> None:
        """Keep and print what is neither ignored nor known."""
        self._show(self._kept(findings))

    def judge(self, findings: Iterable[Finding]) -> None:
        """Report the findings. Raises `TrainingStopped` in mode `stop` where an error is among all that were reported.

        That error is not printed: the parent says it last, and once.
        """
        kept = self._kept(findings)
        error = next((found for found in self.findings if found.severity is Severity.ERROR), None)
        stops = error is not None and self.settings.mode == "stop"
        self._show([found for found in kept if not (stops and found is error)])
        if error is not None and stops:
            self.stopped = TrainingStopped(f"{error.code}: {error.message}", hint=error.hint)
            raise self.stopped

    def _kept(self, findings: Iterable[Finding]) -> list[Finding]:
        kept = [each for each in findings if each.code not in {*self.settings.ignore, *self.known}]
        self.findings += kept
        return kept

    def _show(self, findings: Sequence[Finding]) -> None:
        """Print the findings, the same ones counted: what is wrong with one tensor often is with hundreds."""
        for group in by_rule(findings):
            first, *others = group
            more = f" (and {len(others)} more like it)" if others else ""
            self._print(
                f"{first.severity}: {first.code}: {first.path + ': ' if first.path else ''}{first.message}{more}"
            )
            if first.hint:
                self._print(f"  hint: {first.hint}")

    def note(self, text: str) -> None:
        """Keep and print what is no finding."""
        self.notes.append(text)
        self._print(text)

    def outcome(self, status: TrainingStatus, **rest: Any) -> TrainingOutcome:
        """Return the outcome with all that was seen until now; `rest` are other fields of it."""
        return TrainingOutcome(status=status, findings=tuple(self.findings), notes=self.notes, facts=self.facts, **rest)

    def _print(self, text: str) -> None:
        if self.prints:
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


_GUARDS: list[AttachedGuard] = []
"""One for each Trainer of this process that is not ours."""


class Guard(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Watches one training and writes what it sees into `book`. Raises `TrainingStopped` in mode `stop`."""

    def __init__(self, book: Logbook, *, base: str | None = None) -> None:
        self.book = book
        self.base = base
        self.watches = book.settings.mode != "off"
        self.tracker = SignalTracker(window=book.settings.window)
        self.trainer: Any = None
        """The trainer, where we built it: findings are logged to its trackers, and its folder gets `metrics.jsonl`."""
        self.start: dict[str, torch.Tensor] = {}
        self.moved: float | None = None
        self.gradient: float | None = None
        self.args: Any = None
        self.state: Any = None
        self.model: Any = None
        self._skipped = 0
        self._logging = False
        self._has_saved = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        self.args, self.state, self.model = args, state, model
        classes = {base.__name__ for base in type(args).__mro__}
        self.tracker.method = next((it for it in METHODS.values() if f"{it.prefix}Config" in classes), None)
        self.tracker.mask_truncated = bool(getattr(args, "mask_truncated_completions", False))
        self.tracker.batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._sharded = _is_sharded(args)
        if model is not None and not self._sharded:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if sum(p.numel() for p in trained.values()) <= _SNAPSHOT:
                self.start = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
        kept = Path(args.output_dir) / METRICS
        if self._writes and state.global_step == 0 and kept.exists():  # of an earlier run
            kept.rename(free_name(kept))
        for found in self.book.findings:
            self._log_finding(found)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        if self._sharded or model is None or not self.watches:
            return
        norm = _norm([p.grad for p in model.parameters() if p.requires_grad and p.grad is not None])
        if math.isfinite(norm):
            self.gradient = max(self.gradient or 0.0, norm)
            self._skipped = 0
            return
        self._skipped += 1
        if self._skipped > (_SCALER_PATIENCE if _has_scaler(args) else 0):
            what = f"the gradient is {norm} in step {state.global_step + 1}, before it reached the weights"
            self._stop(trap("nan-gradients", None, what=what))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and not self.tracker.last_step and self.watches:
            control.should_log = True  # a run shorter than logging_steps would end without a figure to judge it by
        engine = getattr(self.trainer, "deepspeed", None)
        if engine is None or not self.watches or _has_scaler(args):
            return
        norm = engine.get_global_grad_norm()
        if norm is not None and not math.isfinite(float(norm)):
            what = f"the gradient of all ranks is {float(norm)} in step {state.global_step}"
            self._stop(trap("nan-gradients", None, what=what))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        if logs is None or self._logging:
            return
        self._write_metrics(logs)
        if self.watches and not (_has_scaler(args) and 0 < self._skipped <= _SCALER_PATIENCE):
            found = self.tracker.observe(state.global_step, logs, self.gradient)
            self.gradient = None
            if found is not None:
                self._stop(found)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if not state.is_world_process_zero:
            return
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        clean_card(saved, self.base)
        if self.watches and not self._has_saved and getattr(self.model, "peft_config", None):
            self._has_saved = True  # the first tells: what it lacks, the last one would lack after a week
            lost = lost_in(saved)
            if lost is not None:
                self._stop(
                    trap(
                        "not-saved",
                        lost.hint or f"lora-tool validate {shlex.quote(str(saved))}",
                        where=saved.name,
                        why=lost.message,
                    )
                )

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        if not self.watches:
            return
        verdict, last = self.tracker.verdict(), self.tracker.last
        if verdict is not None:
            self._stop(verdict)
        since = self.tracker.lost()
        if since is not None and last is not None:
            self.book.report([trap("signal-lost", last.hint, where="training", since=since, why=last.message)])
        if model is not None and self.start:
            self.moved = self._movement(model)
            if self.moved == 0.0:
                hint = "set a learning_rate above 0, and more steps than warmup_steps"
                self._stop(trap("never-moved", hint, count=len(self.start), steps=state.global_step))

    def logits_not_finite(self, said: str) -> None:
        """Report that completions could not be drawn from the model's logits. Raises `TrainingStopped` in mode `stop`."""
        self._stop(trap("nan-logits", None, what=said))

    def _movement(self, model: Any) -> float:
        """Return the norm of the change of all trained parameters."""
        pairs = ((p, self.start.get(name)) for name, p in model.named_parameters())
        changes = (
            p.detach().cpu().float() - old.float() for p, old in pairs if old is not None and old.shape == p.shape
        )
        return math.sqrt(sum(float(change.square().sum()) for change in changes))

    def _stop(self, found: Finding) -> None:
        """Report, once, why the run is doomed. What is not finite is explained by the dtypes."""
        if found.code in self.tracker.reported or found.code in self.book.settings.ignore:
            return
        self.tracker.reported.add(found.code)
        if found.hint is None:
            why, cure = _not_finite(self.args, self.model)
            found = replace(found, message=f"{found.message}; {why}", hint=cure)
        stops = self.book.settings.mode == "stop"
        severity = Severity.ERROR if stops else Severity.WARNING
        found = replace(found, severity=severity, path=f"step {self.state.global_step}")
        self._log_finding(found)
        self.judge([found])

    def judge(self, findings: Iterable[Finding]) -> None:
        """Report the findings. Raises `TrainingStopped` in mode `stop` where one is an error."""
        self.book.judge(findings)

    def _log_finding(self, found: Finding) -> None:
        entry = {f"guard/{found.code}": 1.0}
        self._write_metrics(entry)
        if self.trainer is not None:
            self._logging = True
            try:
                self.trainer.log(entry)
            finally:
                self._logging = False

    @property
    def _writes(self) -> bool:
        return self.trainer is not None and self.state.is_world_process_zero

    def _write_metrics(self, logs: Mapping[str, Any]) -> None:
        if self._writes:
            line = json_value({"step": self.state.global_step, "epoch": self.state.epoch, **logs})
            path = Path(self.args.output_dir) / METRICS
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=str) + "\n")


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


def _norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of all gradients together, as torch's clip_grad_norm_ computes it: waiting for the device once."""
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - what clip_grad_norm_ uses
    return float(torch.linalg.vector_norm(torch.stack([norm.float().to(norms[0].device) for norm in norms])))


def _is_sharded(args: Any) -> bool:
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        return True
    begun = bool(AcceleratorState._shared_state)  # noqa: SLF001 - asking for it would make one
    return begun and AcceleratorState().distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def _has_scaler(args: Any) -> bool:
    """Whether losses are scaled, so that single steps with infinite gradients are skipped and harmless."""
    return bool(args.fp16) and torch.cuda.is_available() and not args.use_cpu


def _not_finite(args: Any, model: Any) -> tuple[str, str]:
    """Return why a figure is NaN or infinite, and the cure."""
    rate = args.learning_rate
    why = f"the learning rate ({rate:g}) may be too high, or the data or the weights hold NaN."
    cure = f"learning_rate: {rate / 10:g}, max_grad_norm: 1.0; lora-tool validate BASE --deep looks for NaN in the base"
    if args.fp16:
        why = "fp16 is on, and an activation above 65504 overflows."
        cure = "bf16: true instead of fp16; keep max_grad_norm: 1.0"
    if model is not None and any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        why = "the weights are float16, and an activation above 65504 overflows."
        cure = "dtype: auto or bfloat16 (float32 with fp16: true scales the loss); keep max_grad_norm: 1.0"
    shown = " TRL would show it as loss 0.0 (logging_nan_inf_filter)" if args.logging_nan_inf_filter else ""
    return why + shown, cure
