"""The guard: a callback of the HF Trainer that watches gradients and logs, and raises when a run is doomed.

It raises because `should_training_stop` would let the script go on to say "completed" and save what it has. All ranks
see the same gathered figures and the same reduced gradients, so all leave together; sharded gradients, of which each
rank sees a part, are judged by the logged norm alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lora_tool.errors import TrainingStopped
from lora_tool.report import Finding, Severity
from lora_tool.train.cards import clean_card
from lora_tool.train.codes import finding, warning
from lora_tool.train.config import GuardSettings
from lora_tool.train.diagnosis import Cause, SignalTracker
from lora_tool.train.methods import Method
from lora_tool.train.saving import free_name

METRICS = "metrics.jsonl"
_SCALER_PATIENCE = 20
"""Steps in a row that a GradScaler may skip: it starts at 65536 and halves, so 16 skips can be its way down."""

_SNAPSHOT = 1 << 26
"""Elements of trained parameters whose start is kept to be compared with the end: an adapter's, not a model's."""


class Guard(TrainerCallback):  # type: ignore[misc] # transformers is not typed
    """Watches one training. `findings` holds what it said; raises `TrainingStopped` in mode `stop`."""

    writes_metrics = True
    """Whether `metrics.jsonl` is kept in the output folder; not in one of somebody else's script."""

    def __init__(
        self,
        settings: GuardSettings,
        method: Method | None = None,
        *,
        base: str | None = None,
        reported: Sequence[Finding] = (),
    ) -> None:
        self.settings = settings
        self.method = method
        self.base = base
        self.reported = reported
        """Findings of before the training, for the trackers that begin with it."""
        self.findings: list[Finding] = []
        self.tracker = SignalTracker(method=method, window=settings.window)
        self.trainer: Any = None
        """The trainer, where we built it: findings are then logged to its trackers."""
        self.start: dict[str, torch.Tensor] = {}
        self.moved: float | None = None
        self.gradient: float | None = None
        self.output_dir: Path | None = None
        self.args: Any = None
        self.state: Any = None
        self.model: Any = None
        self._skipped = 0
        self._logging = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        self.args, self.state, self.model = args, state, model
        self.output_dir = Path(args.output_dir)
        self.tracker.mask_truncated = bool(getattr(args, "mask_truncated_completions", False))
        self.tracker.batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._sharded = _is_sharded(args)
        if model is not None and not self._sharded:
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            if sum(p.numel() for p in trained.values()) <= _SNAPSHOT:
                self.start = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
        if state.is_world_process_zero and self.writes_metrics:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            kept = self.output_dir / METRICS
            if state.global_step == 0 and kept.exists():  # of an earlier run
                kept.rename(free_name(kept))
        for found in self.reported:
            self._log_finding(found)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        if self._sharded or model is None or self.settings.mode == "off":
            return
        gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
        if not gradients:
            self.gradient = max(self.gradient or 0.0, 0.0)
            return
        norm = _norm(gradients)
        if math.isfinite(norm):
            self.gradient = max(self.gradient or 0.0, norm)
            self._skipped = 0
            return
        self._skipped += 1
        if self._skipped > (_SCALER_PATIENCE if _has_scaler(args) else 0):
            message = f"the gradient is {norm} in step {state.global_step + 1}, before it reached the weights"
            self._report(Cause(code="nan-gradients", message=message))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and not self.tracker.last_step and self.settings.mode != "off":
            control.should_log = True  # a run shorter than logging_steps would end without a figure to judge it by
        engine = getattr(self.trainer, "deepspeed", None)
        if engine is None or self.settings.mode == "off" or _has_scaler(args):
            return
        norm = engine.get_global_grad_norm()
        if norm is not None and not math.isfinite(float(norm)):
            message = f"the gradient of all ranks is {float(norm)} in step {state.global_step}"
            self._report(Cause(code="nan-gradients", message=message))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        if logs is None or self._logging:
            return
        if state.is_world_process_zero:
            self._write_metrics(logs)
        if self.settings.mode == "off":
            return
        if _has_scaler(args) and 0 < self._skipped <= _SCALER_PATIENCE:
            return
        cause = self.tracker.observe(state.global_step, logs, self.gradient)
        self.gradient = None
        if cause is not None and cause.code not in self.tracker.reported:
            self._report(cause)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            clean_card(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.base)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        if self.settings.mode == "off":
            return
        cause = self.tracker.verdict()
        if cause is not None:
            self._report(cause)
        since = self.tracker.lost()
        if since is not None and self.tracker.last is not None:
            message = f"no signal since step {since}: {self.tracker.last.message}"
            self.findings.append(warning("signal-lost", message, hint=self.tracker.last.hint, where="training"))
        if model is not None and self.start:
            self.moved = self._movement(model)
            if self.moved == 0.0:
                text = f"none of {len(self.start)} trained parameters changed in {state.global_step} steps"
                hint = "a learning_rate above 0, and more steps than warmup_steps"
                self._report(Cause(code="never-moved", message=text, hint=hint))

    def logits_not_finite(self, said: str) -> None:
        """Report that completions could not be drawn from the model's logits. Raises `TrainingStopped` in mode `stop`."""
        self._report(Cause(code="nan-logits", message=said))

    def _movement(self, model: Any) -> float:
        """Return the norm of the change of all trained parameters."""
        total = 0.0
        for name, parameter in model.named_parameters():
            before = self.start.get(name)
            if before is not None and before.shape == parameter.shape:
                total += float((parameter.detach().cpu().float() - before.float()).square().sum())
        return math.sqrt(total)

    def _report(self, cause: Cause) -> None:
        if cause.code in self.settings.ignore or cause.code in self.tracker.reported:
            return
        self.tracker.reported.add(cause.code)
        numeric = cause.code in ("nan-gradients", "nan-loss", "nan-logits")
        found = finding(
            cause.code,
            Severity.ERROR if self.settings.mode == "stop" else Severity.WARNING,
            cause.message + (f"; {_why_not_finite(self.args, self.model)}" if numeric else ""),
            hint=_cure(self.args, self.model) if numeric else cause.hint,
            where=f"step {self.state.global_step}",
        )
        self.findings.append(found)
        self._log_finding(found)
        if self.settings.mode == "stop":
            raise TrainingStopped(f"{found.code}: {found.message}", hint=found.hint)

    def _log_finding(self, found: Finding) -> None:
        entry = {f"guard/{found.code}": 1.0}
        if self.state.is_world_process_zero:
            self._write_metrics(entry)
        if self.trainer is not None:
            self._logging = True
            try:
                self.trainer.log(entry)
            finally:
                self._logging = False

    def _write_metrics(self, logs: Mapping[str, Any]) -> None:
        if self.output_dir is None or not self.writes_metrics:
            return
        plain = {name: _json_number(value) for name, value in logs.items()}
        line = json.dumps({"step": self.state.global_step, "epoch": self.state.epoch, **plain}, default=str)
        with (self.output_dir / METRICS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of all gradients together, as torch's clip_grad_norm_ computes it: waiting for the device once."""
    norms = torch._foreach_norm(gradients)  # noqa: SLF001 - what clip_grad_norm_ uses
    return float(torch.linalg.vector_norm(torch.stack([norm.float().to(norms[0].device) for norm in norms])))


def _json_number(value: Any) -> Any:
    """Return a value that JSON has: NaN and infinity as words."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_sharded(args: Any) -> bool:
    return bool(getattr(args, "deepspeed", None)) or bool(getattr(args, "fsdp", None)) or _accelerate_shards()


def _accelerate_shards() -> bool:
    from accelerate.state import AcceleratorState, DistributedType  # noqa: PLC0415 - comes with the extra

    if not AcceleratorState._shared_state:  # noqa: SLF001 - asking for it would make one
        return False
    return AcceleratorState().distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def _has_scaler(args: Any) -> bool:
    """Whether losses are scaled, so that single steps with infinite gradients are skipped and harmless."""
    return bool(args.fp16) and torch.cuda.is_available() and not args.use_cpu


def _half(model: Any) -> bool:
    return model is not None and any(parameter.dtype is torch.float16 for parameter in model.parameters())


def _why_not_finite(args: Any, model: Any) -> str:
    shown = " TRL would show it as loss 0.0 (logging_nan_inf_filter)" if args.logging_nan_inf_filter else ""
    if _half(model):
        return "the weights are float16, and an activation above 65504 overflows." + shown
    if args.fp16:
        return "fp16 is on, and an activation above 65504 overflows." + shown
    return f"the learning rate ({args.learning_rate:g}) may be too high, or the data or the weights hold NaN." + shown


def _cure(args: Any, model: Any) -> str:
    if _half(model):
        return "dtype: auto or bfloat16 (float32 with fp16: true scales the loss); keep max_grad_norm: 1.0"
    if args.fp16:
        return "bf16: true instead of fp16; keep max_grad_norm: 1.0"
    return f"learning_rate: {args.learning_rate / 10:g}, max_grad_norm: 1.0; lora-tool validate BASE --deep looks for NaN in the base"
