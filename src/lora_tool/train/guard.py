"""The guard: a callback of the HF Trainer that watches gradients and logs, and raises when a run is doomed.

It raises because `should_training_stop` would let the script go on to say "completed" and save what it has. All ranks
see the same gathered figures and the same reduced gradients, so all leave together; sharded gradients, of which each
rank sees a part, are judged by the logged norm alone.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType
from msgspec.structs import replace
from transformers import TrainerCallback

from lora_tool.report import Finding, Severity
from lora_tool.train.diagnosis import SignalTracker
from lora_tool.train.job import json_value
from lora_tool.train.logbook import Logbook
from lora_tool.train.methods import METHODS
from lora_tool.train.saving import clean_card, free_name, lost_in
from lora_tool.train.traps import trap

METRICS = "metrics.jsonl"
_SCALER_PATIENCE = 20
"""Steps in a row that a GradScaler may skip: it starts at 65536 and halves, so 16 skips can be its way down."""

_SNAPSHOT = 1 << 26
"""Elements of trained parameters whose start is kept to be compared with the end: an adapter's, not a model's."""


class Guard(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Watches one training and writes what it sees into `book`. Raises `TrainingStopped` in mode `stop`."""

    def __init__(self, book: Logbook) -> None:
        self.book = book
        self.base: str | None = None
        """The base model as the config names it, where we built the trainer: saved cards name it."""
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
